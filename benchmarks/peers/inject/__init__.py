"""Not imported: for mypy, which would else meet two modules called sitecustomize."""
