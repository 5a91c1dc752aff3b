/** The tokenizers of runs: words, or byte pair encodings as the package tokenizers writes them. */

import { Tokenizer } from "@huggingface/tokenizers";

export interface TextEncoder {
  encode(text: string): number[];
  decode(tokens: number[]): string;
}

/** Read what a run's tokenizer.json says. */
export function readTokenizer(content: { words?: string[] }): TextEncoder {
  return content.words ? new Words(content.words) : new BytePairs(content);
}

/** Words at white space; a line feed is the word <eos>, and a word that is not known is <unk>. */
class Words implements TextEncoder {
  private readonly numbers: Map<string, number>;
  private readonly unknown: number;

  constructor(private readonly words: string[]) {
    this.numbers = new Map(words.map((word, number) => [word, number]));
    this.unknown = this.numbers.get("<unk>")!;
  }

  encode(text: string): number[] {
    // what Python's str.split takes for white space, which JavaScript's \s is not quite
    const blanks = /[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+/;
    const words = text.replaceAll("\n", " <eos> ").split(blanks);
    return words.filter((word) => word).map((word) => this.numbers.get(word) ?? this.unknown);
  }

  decode(tokens: number[]): string {
    const words = tokens.map((token) => this.words[token]).map((word) => (word === "<eos>" ? "\n" : word));
    return words.join(" ").replaceAll(" \n", "\n").replaceAll("\n ", "\n");
  }
}

/** A tokenizer.json: a text has the numbers that it has in training. */
class BytePairs implements TextEncoder {
  private readonly tokenizer: Tokenizer;

  constructor(content: object) {
    this.tokenizer = new Tokenizer(content, { clean_up_tokenization_spaces: false });
    keepByteOrderMarks(this.tokenizer.decoder as Decoder | null);
  }

  encode(text: string): number[] {
    return text ? this.tokenizer.encode(text, { add_special_tokens: false }).ids : [];
  }

  decode(tokens: number[]): string {
    return tokens.length ? this.tokenizer.decode(tokens, { skip_special_tokens: false }) : "";
  }
}

interface Decoder {
  text_decoder?: TextDecoder;
  decoders?: Decoder[];
}

/** The decoder of byte fallback takes a leading U+FEFF for a mark, and drops it; in a text it is a letter. */
function keepByteOrderMarks(decoder: Decoder | null): void {
  if (decoder?.text_decoder) decoder.text_decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  decoder?.decoders?.forEach(keepByteOrderMarks);
}

const WINDOW = 16;
const LONGEST = 3; // bytes of a letter that is not complete

/** The text of a stream, token by token: letters come whole, and the pieces add up to the whole text. */
export class TextPieces {
  private window: number[];

  constructor(
    private readonly tokenizer: TextEncoder,
    before: number[],
  ) {
    this.window = before.slice(-WINDOW);
  }

  add(token: number): string {
    const before = settled(this.tokenizer.decode(this.window)).length;
    this.window.push(token);
    const piece = settled(this.tokenizer.decode(this.window)).slice(before);
    this.window = this.window.slice(-WINDOW);
    return piece;
  }
}

/** Cut off an end that the next token may change. */
function settled(text: string): string {
  const undecided = /\ufffd*$/.exec(text)![0].length;
  return text.slice(0, text.length - Math.min(undecided, LONGEST));
}
