"""Launches on the simulator: of one program or of two levels of it, in one order, in many, overlapped, with
the static checks."""
