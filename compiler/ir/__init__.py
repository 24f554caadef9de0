"""What the three levels are made of (spec.py), and how they are shown."""
