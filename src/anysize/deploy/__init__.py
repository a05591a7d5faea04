"""A fleet of real devices on Flower: laying it out, starting its server and its devices, running on it.

    anysize deploy init DIR  ->  anysize server DIR  +  anysize join device.toml ...  ->  anysize run --superlink DIR

`layout` and `certificates` need no Flower; every other module does.
"""
