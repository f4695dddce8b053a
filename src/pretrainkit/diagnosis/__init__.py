"""Why a training run is slow: measured in the run itself, ranked, with the change to make."""
