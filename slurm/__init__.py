"""Rendering, submitting and watching SLURM jobs. Imports none of the other packages."""
