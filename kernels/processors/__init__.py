"""What changes logits for a row that asks for it; `actors/processors` has names and parameters."""
