"""The embedded default: a tiny checkpoint in the real layout and a dataset of drawn screenshots."""
