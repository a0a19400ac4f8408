"""moecomm"""
