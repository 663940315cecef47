"""What the notebooks and studies use: records, figures, gradient studies, the notebook runner, float64 oracles."""
