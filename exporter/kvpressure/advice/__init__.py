"""What to do about a diagnosis: limits, plan, triage and the sentences that explain them."""
