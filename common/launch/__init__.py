"""Who is this process, who starts the others, and how do they all end.

Ranks from any launcher's environment, ranks started on this machine, the one `error:` line and the
exit status; advice for known failures (`hints`), and whether CUDA, NCCL and the driver are the
pinned ones (`stack`). Nothing here imports torch when it is imported: a launcher starts at once,
and bad usage is refused before torch is loaded.

Environment variables of the project, all of them:

    RECIPES_ERRORS        where ranks leave their errors for the process that started them
    RECIPES_PARENT        its process id: a rank ends when that process does
    RECIPES_COMMAND       the command that the user typed
    RECIPES_LISTEN_FD     rank 0's socket, bound by the launcher
    RECIPES_STOP_MARK     file that a rank leaves when it stops before it trains (slurm/)
    RECIPES_ROOT          the repository, for copies of the sbatch files elsewhere (slurm/job.sh)
    RECIPES_STACK         the image's CUDA stack
    RECIPES_COMMIT        the commit that the image was built from
    RECIPES_IMAGE_DIGEST  the image's digest, given by `make image-run`
"""
