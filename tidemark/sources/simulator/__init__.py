"""Writers that live on real servers, for the demo and for torture: what they do, and the script of what befalls them.

The processes themselves, and the readers whose effects are held against the truth, are composed in `app.simulation`.
"""
