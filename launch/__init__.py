"""The `tilescale` command: starts ranks, says what a machine has."""
