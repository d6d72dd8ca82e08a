"""The room that merges what actors count and shows it to Prometheus."""
