"""The feature cache: records, image keys, the vision tower, and the store of its output.

Nothing is imported here: torch takes seconds, and `pipeline --help` needs none of it.
"""
