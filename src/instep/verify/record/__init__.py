"""What runs inside each rank while `instep verify` trains: it notes what every optimizer step was made of.

The script is changed in what `Options` says and in nothing else; after the wanted steps it is ended on all ranks.
"""
