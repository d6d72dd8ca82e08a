"""The room at the street: protocols, connections, and the record of each open request."""
