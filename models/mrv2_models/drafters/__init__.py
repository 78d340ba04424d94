"""Draft heads: small modules that guess a target's next tokens from its hidden states."""
