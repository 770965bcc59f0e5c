"""Support Slurm: read the variables that `srun` sets, connect a job step's ranks, and write batch scripts.

`step` reads the variables of a job step, and `rendezvous` connects the step's ranks. `World.detect` and `process_group`
use these modules. `config` contains the job settings, and `job` writes and submits the batch script.
`commands/slurm.py` combines the job settings with the config of a training run.
"""
