"""What may be asked of a server and of a request, and every refusal in words.

Option objects and the checks that they share. Imports nothing of ours.
"""
