"""What the budgets and the accuracy claims are measured with; one command each, run from the repository root."""
