"""How the model is split over workers: one file per axis of the layout, each applied to a plain model from outside."""
