"""Python functions become tile IR: their AST is rewritten so that control flow calls hooks, then they are run
once."""
