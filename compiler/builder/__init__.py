"""What a trace is made of while a kernel runs once: the statements collected so far, the values that names
stand for, the constructs."""
