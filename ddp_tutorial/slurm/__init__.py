"""Support Slurm: read the variables that `srun` sets, connect a job step's ranks, and write batch scripts.

`step` reads the variables of a job step and `rendezvous` connects its ranks; `World.detect` and `process_group` use
them. `config` contains the settings of a job, and `job` writes its batch script and submits it. `commands/slurm.py`
combines the job settings with the config of a training run.
"""
