"""An experiment: its parts, the sizes that its devices train, its plan."""
