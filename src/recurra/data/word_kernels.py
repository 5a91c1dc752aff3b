"""Splits text into words and numbers them in one pass over its bytes, 512 words at a time.

Words are kept as the text " ".join(words) + " ", with the place where each begins, and found through a table with open
addresses: an entry has 32 bits of a word's hash above its number plus 1, and 0 is free.
"""

import numpy as np

from recurra.kernels.launch import compile_function, compile_inline

_PRIME, _BASIS = np.uint64(0x100000001B3), np.uint64(0xCBF29CE484222325)  # FNV-1a
_HALF, _LOW = np.uint64(32), np.uint64(2**32 - 1)
_NONE = np.uint64(0)


_BATCH = 512  # lookups that wait for the memory together


# Called for every byte with numbers: Numba counts references to arrays, which takes longer than all the rest.
@compile_inline
def _space(c, second, third):  # type: ignore[no-untyped-def]
    """How many bytes the white space that begins with these three has, as str.split sees it; 0 for a letter."""
    if c < 0x80:
        return 1 if c == 0x20 or 0x09 <= c <= 0x0D or 0x1C <= c <= 0x1F else 0
    if c == 0xC2:
        return 2 if second == 0x85 or second == 0xA0 else 0
    if c == 0xE1:
        return 3 if second == 0x9A and third == 0x80 else 0
    if c == 0xE2:
        late = third == 0xA8 or third == 0xA9 or third == 0xAF
        return 3 if (second == 0x80 and (third <= 0x8A or late)) or (second == 0x81 and third == 0x9F) else 0
    return 3 if c == 0xE3 and second == 0x80 and third == 0x80 else 0


@compile_function
def _split(text, start, begins, ends, keys):  # type: ignore[no-untyped-def]
    """Find as many words from `start` on as there is room for, and their hashes; return their number, and the end."""
    i, size, n = start, text.size - 2, 0
    while i < size and n < begins.size:
        wide = _space(text[i], text[i + 1], text[i + 2])
        if wide:
            i += wide
            continue
        begin, key = i, _BASIS
        while 0x20 < text[i] < 0x80 or not _space(text[i], text[i + 1], text[i + 2]):
            key = (key ^ np.uint64(text[i])) * _PRIME
            i += 1
        begins[n], ends[n], keys[n] = begin, i, key ^ (key >> np.uint64(29))
        n += 1
    return n, i


@compile_function
def _fetch(keys, n, table, letters, begins):  # type: ignore[no-untyped-def]
    """Read what looking up these words is going to read, so that the memory answers for many of them at once."""
    mask, total = np.uint64(table.size - 1), np.int64(0)
    for k in range(n):
        keys[n + k] = table[keys[k] & mask]
    for k in range(n):
        keys[n + k] = begins[max(0, np.int64(keys[n + k] & _LOW) - 1)]
    for k in range(n):
        total += letters[keys[n + k]]
    return total


@compile_function
def number_words(text, start, numbers, table, letters, begins, n_words, unknown):  # type: ignore[no-untyped-def]
    """Write the number of each word of `text` from byte `start` on; return (numbers written, words known, the end).

    text: (n,) uint8, followed by white space and two bytes. numbers: (at least n / 2 + 1,) int32, written. table: (a
    power of 2,) uint64. letters: uint8, and begins: (words + 1,) int64. unknown: the number of a word that the table
    lacks; below 0, it is added, and the walk ends early, before a word, when `table` is half full or `letters` or
    `begins` have no room.
    """
    i, written, mask, seen = start, 0, np.uint64(table.size - 1), np.int64(0)
    firsts, lasts, keys = np.empty(_BATCH, np.int64), np.empty(_BATCH, np.int64), np.empty(2 * _BATCH, np.uint64)
    while i < text.size - 2:
        n, i = _split(text, i, firsts, lasts, keys)
        seen += _fetch(keys, n, table, letters, begins)
        for w in range(n):
            begin, size, key, number = firsts[w], lasts[w] - firsts[w], keys[w], -1
            slot = key & mask
            while number < 0 and table[slot] != _NONE:
                if table[slot] >> _HALF == key >> _HALF:
                    found = np.int64(table[slot] & _LOW) - 1
                    first, k = begins[found], 0
                    while k < size and letters[first + k] == text[begin + k]:
                        k += 1
                    if k == size and letters[first + k] == 0x20:
                        number = int(found)
                slot = (slot + np.uint64(1)) & mask
            if number < 0 and unknown >= 0:
                number = unknown
            elif number < 0:
                first, end = begins[n_words], begins[n_words] + size
                if end >= letters.size or n_words + 1 >= begins.size or 2 * (n_words + 1) > table.size:
                    return written, n_words, begin, seen
                for k in range(size):
                    letters[first + k] = text[begin + k]
                letters[end] = 0x20
                table[slot] = (key >> _HALF << _HALF) | np.uint64(n_words + 1)
                number, n_words = n_words, n_words + 1
                begins[n_words] = end + 1
            numbers[written] = number
            written += 1
    return written, n_words, i, seen
