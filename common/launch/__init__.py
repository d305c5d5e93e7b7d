"""Which rank is this process, who starts the ranks, and how do they end?

Importing this room imports no torch: a launcher starts at once, and bad usage is refused before
torch is loaded.

Environment variables of the project, all of them:

    RECIPES_ERRORS        file in which ranks leave their errors for the process that started them
    RECIPES_MESSAGES      pipe on which that process reads what libraries of the ranks say
    RECIPES_REACHED       file in which rank 0 records its last step, for a restart
    RECIPES_PARENT        that process's id: a rank ends when that process ends
    RECIPES_COMMAND       the command that the user typed
    RECIPES_LISTEN_FD     rank 0's socket, bound by the launcher
    RECIPES_CHECK         folder for a run that ends before its first step (--check)
    RECIPES_TRACE_STEP    step whose tensors are hashed (make reproduce, --trace-step)
    RECIPES_STATUS        file for a status that peers may hide: 2, or 75 before training (slurm/)
    RECIPES_ROOT          the repository, for sbatch files copied elsewhere (slurm/job.sh)
    RECIPES_STACK         the image's CUDA stack
    RECIPES_COMMIT        the commit that the image was built from
    RECIPES_IMAGE_DIGEST  the image's digest, given by `make image-run`
"""
