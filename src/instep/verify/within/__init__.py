"""What can be judged from the ranks of one run alone: no other run is needed for it."""
