"""Slurm: the variables that `srun` sets, the rendezvous of the ranks of a step, and batch scripts.

`step` reads the variables of a job step and `rendezvous` connects its ranks; `World.detect` and `process_group` use
them. `config` contains the settings of a job, and `job` writes its batch script and submits it. `commands/slurm.py`
combines them with the config of a training run.
"""
