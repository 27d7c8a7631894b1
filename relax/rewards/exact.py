"""The verifier "exact": the response is the label, surrounding white space aside."""


def exact(response_text: str, label: str) -> float:
    """Give 1.0 if the two are equal after strip, else 0.0."""
    return float(response_text.strip() == label.strip())
