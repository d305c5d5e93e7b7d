"""Who is this process, who starts the others, and how do they all end.

Ranks from any launcher's environment, ranks started on this machine, the one `error:` line and the
exit status. Nothing here imports torch when it is imported: a launcher starts at once, and bad
usage is refused before torch is loaded.
"""
