# Drops what a job has inherited from the shell that submitted it and that belongs to another launch.
# job.sh and the jobs of submit.py read this file before they call srun, which sets what a task needs.
# shellcheck shell=bash

# Of a launcher, or of a notebook that played one: every task would take itself for that rank.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK GROUP_WORLD_SIZE \
    ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME MPI_LOCALRANKID MPI_LOCALNRANKS \
    "${!TORCHELASTIC_@}" "${!OMPI_@}" "${!PMI_@}" "${!PMIX_@}"
# Any other MASTER_ADDR is taken as given; the loopback cannot be the address of a job's first node.
case ${MASTER_ADDR:-} in localhost | 127.* | ::1) unset MASTER_ADDR MASTER_PORT ;; esac

# Of an interactive session (salloc, srun --pty): where its one task was bound, its memory (a step
# without a request gets all of its job's) and its terminal, by which a task is taken for a shell.
unset "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}" "${!SLURM_PTY_@}" "${!SLURM_STEP@}" \
    SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE
