"""Shadow mode: parts that run beside their references on live traffic. Assembled only where a config asks for it.

The results of the shadowed part are used; the reference gets the same inputs, writes no cache, and may raise without
harm. Differences stay on the device until their step retires.
"""
