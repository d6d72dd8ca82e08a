"""The parts that models are made of, written once."""
