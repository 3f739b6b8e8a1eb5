"""The two models of a decoding step: the target (`target.py`) and the draft head (`heads.py`)."""
