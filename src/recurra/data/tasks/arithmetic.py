"""Parity and modular arithmetic: state that a model has to track through every token.

The tasks are those of Delétang et al., "Neural networks and the Chomsky hierarchy" (2023). A sequence is read to its
end, and the one target stands at its last token.
"""

import numpy as np
from jaxtyping import Int

MODULUS = 5
PLUS, MINUS, TIMES, OPEN, CLOSE, EQUALS = range(MODULUS, MODULUS + 6)
"""Tokens of modular arithmetic; those below are the digits 0 to 4."""


def parity(random: np.random.Generator, batch_size: int, length: int) -> tuple[np.ndarray, Int[np.ndarray, " B"]]:
    """Draw bits: (B, length), and whether the number of ones is odd."""
    bits = random.integers(0, 2, (batch_size, length))
    return bits, bits.sum(1) % 2


def modular_arithmetic(
    random: np.random.Generator, batch_size: int, length: int
) -> tuple[np.ndarray, Int[np.ndarray, " B"]]:
    """Draw sums, differences and products without brackets, such as 3 + 1 * 4 - 2 =, and their values modulo 5.

    Products come before sums. A sequence has `length` tokens with the equals sign, one fewer if that is odd: digits and
    operators alternate.

    Args:
        random: the source of chance.
        batch_size: the number of sequences.
        length: tokens of a sequence, at least 2.
    """
    n_digits = length // 2
    tokens = np.empty((batch_size, 2 * n_digits), dtype=np.int64)
    digits = tokens[:, ::2] = random.integers(0, MODULUS, (batch_size, n_digits))
    operators = random.integers(PLUS, TIMES + 1, (batch_size, n_digits - 1))
    tokens[:, 1:-1:2], tokens[:, -1] = operators, EQUALS
    total, product = np.zeros(batch_size, dtype=np.int64), digits[:, 0]
    for number in range(n_digits - 1):
        operator, digit = operators[:, number], digits[:, number + 1]
        multiplied = operator == TIMES
        total = np.where(multiplied, total, total + product) % MODULUS
        product = np.where(multiplied, product * digit, np.where(operator == PLUS, digit, -digit)) % MODULUS
    return tokens, (total + product) % MODULUS


def bracketed_arithmetic(
    random: np.random.Generator, batch_size: int, length: int
) -> tuple[np.ndarray, Int[np.ndarray, " B"]]:
    """Draw sums, differences and products with nested brackets, such as ( 2 - ( - 1 ) ) =, and their values modulo 5.

    A sequence has exactly `length` tokens with the equals sign.

    Args:
        random: the source of chance.
        batch_size: the number of sequences.
        length: tokens of a sequence, at least 2.
    """
    tokens = np.empty((batch_size, length), dtype=np.int64)
    values = np.empty(batch_size, dtype=np.int64)
    for row in range(batch_size):
        expression, values[row] = _bracketed(random, length - 1)
        tokens[row, :-1], tokens[row, -1] = expression, EQUALS
    return tokens, values


def _bracketed(random: np.random.Generator, length: int) -> tuple[list[int], int]:
    """Draw an expression of exactly `length` tokens: d, - d, ( d ), ( - d ) or ( left operator right ).

    With a stack of its own: a long expression may nest deeper than Python's calls.
    """
    tokens: list[int] = []
    values: list[int] = []
    todo: list[tuple[str, int]] = [("expression", length)]
    while todo:
        kind, argument = todo.pop()
        if kind == "expression":
            todo += _parts(random, argument)[::-1]
        elif kind == "write":
            tokens.append(argument)
            if argument < MODULUS:
                values.append(argument)
        elif kind == "negate":
            values.append(-values.pop() % MODULUS)
        else:
            right, left = values.pop(), values.pop()
            values.append({PLUS: left + right, MINUS: left - right, TIMES: left * right}[argument] % MODULUS)
    return tokens, values.pop()


def _parts(random: np.random.Generator, length: int) -> list[tuple[str, int]]:
    """What an expression of this length consists of, in order."""
    digit = ("write", int(random.integers(0, MODULUS)))
    if length <= 4:
        signed = [("write", MINUS), digit, ("negate", 0)] if length % 2 == 0 else [digit]
        return [("write", OPEN), *signed, ("write", CLOSE)] if length > 2 else signed
    left, operator = int(random.integers(1, length - 3)), int(random.integers(PLUS, TIMES + 1))
    terms = [("expression", left), ("write", operator), ("expression", length - 3 - left)]
    return [("write", OPEN), *terms, ("write", CLOSE), ("combine", operator)]
