"""What each preset needs: predicted for large models, counted where they fit here."""
