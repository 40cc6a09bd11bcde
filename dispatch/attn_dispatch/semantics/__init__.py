"""What a call means, for every implementation alike: who may attend to whom, what is padding."""
