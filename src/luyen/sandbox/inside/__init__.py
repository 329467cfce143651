"""What runs on the other side: the guard of a program, its walls, and the program itself.

These modules import nothing but the standard library, since a program waits for them.
"""
