"""Images from the features of a block behind the first: what updates leak whose first layers are not trained."""
