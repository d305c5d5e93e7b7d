# Drops what a job has from the shell that submitted it and that belongs to another launch: a rank's
# variables (exported, or of a launcher around the shell), and those of a Slurm job or step around it
# (srun --pty, salloc, a job that submits the next one). Read by job.sh and by the jobs of submit.py
# before they call srun, which gives each task its own.
# shellcheck shell=bash
for name in RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MPI_LOCALRANKID MPI_LOCALNRANKS \
    RECIPES_ERRORS RECIPES_MESSAGES RECIPES_PARENT RECIPES_LISTEN_FD RECIPES_COMMAND RECIPES_REACHED \
    "${!TORCHELASTIC_@}" "${!OMPI_COMM_WORLD_@}" "${!PMI_@}" "${!PMIX_@}"; do
    [[ -z ${!name:-} ]] || echo "ignored, because it comes from the shell that submitted this job: $name=${!name}"
    unset "$name"
done
case ${MASTER_ADDR:-} in # another host on each node, and the port would be that of all jobs here
localhost | 127.* | ::1)
    echo "ignored, because it comes from the shell that submitted this job: MASTER_ADDR=$MASTER_ADDR"
    unset MASTER_ADDR MASTER_PORT
    ;;
esac
unset "${!SLURM_STEP@}" "${!SLURM_PTY_@}" "${!SLURM_SRUN_@}" SLURM_LAUNCH_NODE_IPADDR
[[ -z ${SLURM_CPU_BIND_TYPE:-} ]] || unset "${!SLURM_CPU_BIND@}" # without a type it is the user's
[[ -z ${SLURM_MEM_BIND_TYPE:-} ]] || unset "${!SLURM_MEM_BIND@}"
# Of what Slurm sets in some jobs only, the job's record tells what this one has.
record=$(scontrol --oneliner show job "${SLURM_JOB_ID:-none}" 2>/dev/null | grep "^JobId=${SLURM_JOB_ID:-none} ")
if [[ $record ]]; then
    case $record in # the three exclude each other
    *" MinMemoryCPU="*) unset SLURM_MEM_PER_NODE SLURM_MEM_PER_GPU ;;
    *" MemPerTres="*) unset SLURM_MEM_PER_NODE SLURM_MEM_PER_CPU ;;
    *" MinMemoryNode=0 "*) unset SLURM_MEM_PER_NODE SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU ;;
    *) unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU ;;
    esac
    [[ $record == *[=:/]gpu[:=\ ,]* ]] ||
        unset "${!SLURM_GPU@}" SLURM_JOB_GPUS SLURM_CPUS_PER_GPU SLURM_NTASKS_PER_GPU SLURM_TRES_PER_TASK
    [[ $record == *" CPUs/Task=${SLURM_CPUS_PER_TASK:-} "* ]] || unset SLURM_CPUS_PER_TASK
    [[ $record == *" NumTasks=${SLURM_NTASKS:-} "* ]] || unset SLURM_NTASKS SLURM_NPROCS
    # A job of one node that asked for no tasks has NumTasks=1, too; Slurm's figure is then of cores.
    [[ ${SLURM_NNODES:-1} != 1 || ${SLURM_TASKS_PER_NODE:-${SLURM_NTASKS:-}} == "${SLURM_NTASKS:-}" ]] ||
        unset SLURM_NTASKS SLURM_NPROCS
    [[ $record == *" HetJobId="* ]] || unset "${!SLURM_HET_@}"
    [[ $record == *" ArrayTaskId="* ]] || unset "${!SLURM_ARRAY_@}"
    [[ $record != *" Restarts=0 "* ]] || unset SLURM_RESTART_COUNT
fi
