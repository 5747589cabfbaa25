"""What an update of few numbers determines of its image, whether or not an attack finds it."""
