"""What each stack needs: predicted for large models, counted where they fit here."""
