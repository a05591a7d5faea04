"""What a client does with a message: it trains, calibrates or evaluates a network on the client's data."""
