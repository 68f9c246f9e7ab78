"""The options of a server, of a family and of a request, with the checks that refuse bad values.

An error says what was given, what is allowed and what to do. This package imports no other room.
"""
