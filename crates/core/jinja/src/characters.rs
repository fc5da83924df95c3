//! Characters by their class, and texts in another case, as Python's `str` has them.

use super::containers::TextBuilder;
use super::error::Error;
use super::meter::Meter;
use super::value::Value;
use std::rc::Rc;

/// The zeros of Unicode's decimal digits. Nine more digits follow each.
const ZEROS: &str = "\
    \u{30}\u{660}\u{6f0}\u{7c0}\u{966}\u{9e6}\u{a66}\u{ae6}\u{b66}\u{be6}\u{c66}\u{ce6}\u{d66}\u{de6}\
    \u{e50}\u{ed0}\u{f20}\u{1040}\u{1090}\u{17e0}\u{1810}\u{1946}\u{19d0}\u{1a80}\u{1a90}\u{1b50}\
    \u{1bb0}\u{1c40}\u{1c50}\u{a620}\u{a8d0}\u{a900}\u{a9d0}\u{a9f0}\u{aa50}\u{abf0}\u{ff10}\u{104a0}\
    \u{10d30}\u{11066}\u{110f0}\u{11136}\u{111d0}\u{112f0}\u{11450}\u{114d0}\u{11650}\u{116c0}\u{11730}\
    \u{118e0}\u{11950}\u{11c50}\u{11d50}\u{11da0}\u{16a60}\u{16ac0}\u{16b50}\u{1d7ce}\u{1d7d8}\u{1d7e2}\
    \u{1d7ec}\u{1d7f6}\u{1e140}\u{1e2f0}\u{1e950}\u{1fbf0}";
/// The digits that are not decimal: superscripts, in circles, and the like.
const OTHER_DIGITS: [(char, char); 20] = [
    ('\u{b2}', '\u{b3}'),
    ('\u{b9}', '\u{b9}'),
    ('\u{1369}', '\u{1371}'),
    ('\u{19da}', '\u{19da}'),
    ('\u{2070}', '\u{2070}'),
    ('\u{2074}', '\u{2079}'),
    ('\u{2080}', '\u{2089}'),
    ('\u{2460}', '\u{2468}'),
    ('\u{2474}', '\u{247c}'),
    ('\u{2488}', '\u{2490}'),
    ('\u{24ea}', '\u{24ea}'),
    ('\u{24f5}', '\u{24fd}'),
    ('\u{24ff}', '\u{24ff}'),
    ('\u{2776}', '\u{277e}'),
    ('\u{2780}', '\u{2788}'),
    ('\u{278a}', '\u{2792}'),
    ('\u{10a40}', '\u{10a43}'),
    ('\u{10e60}', '\u{10e68}'),
    ('\u{11052}', '\u{1105a}'),
    ('\u{1f100}', '\u{1f10a}'),
];
/// The ideographs that are numbers.
const NUMERALS: &str = "\
    㐅㒃㠪㭍一七万三九二五亖亿什仟仨伍佰億兆兩八六十千卄卅卌叁参參叄四壱壹幺廾廿弌弍弎弐拾捌柒漆玖百肆萬貮貳贰阡陆陌陸零\
    \u{f96b}\u{f973}\u{f978}\u{f9b2}\u{f9d1}\u{f9d3}\u{f9fd}\
    \u{20001}\u{20064}\u{200e2}\u{20121}\u{2092a}\u{20983}\
    \u{2098c}\u{2099c}\u{20aea}\u{20afd}\u{20b19}\u{22390}\
    \u{22998}\u{23b1b}\u{2626d}\u{2f890}";

/// `'5'` in any script.
pub(super) fn is_decimal(character: char) -> bool {
    let number = u32::from(character);
    character.is_numeric() && ZEROS.chars().any(|zero| (u32::from(zero)..u32::from(zero) + 10).contains(&number))
}

/// A decimal digit, or one like `'\u{b2}'`.
pub(super) fn is_digit(character: char) -> bool {
    is_decimal(character) || OTHER_DIGITS.iter().any(|(first, last)| (*first..=*last).contains(&character))
}

/// A digit, a fraction, a Roman or a Chinese number.
pub(super) fn is_numeric(character: char) -> bool {
    character.is_numeric() || NUMERALS.contains(character)
}

/// A letter: in Rust numbers such as `'\u{2167}'` are alphabetic too.
pub(super) fn is_letter(character: char) -> bool {
    character.is_alphabetic() && !character.is_numeric()
}

/// Some letter has a case, and none has the other one.
pub(super) fn is_in_case(text: &str, lower: bool) -> bool {
    let [has_lower, has_upper] = [char::is_lowercase, char::is_uppercase].map(|is| text.chars().any(is));
    has_lower != has_upper && has_lower == lower
}

/// Words of letters, digits and `_`.
pub(super) fn count_words(text: &str) -> usize {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).count()
}

/// A text in another case. `name` is that of the method.
pub(super) fn change_case(meter: &Rc<Meter>, text: &str, name: &str) -> Result<Value, Error> {
    let is_cased = |c: char| c.is_lowercase() || c.is_uppercase();
    match name {
        "upper" => changed(meter, text, |_, _| Case::Upper),
        "casefold" => changed(meter, text, |_, _| Case::Folded),
        "swapcase" => changed(meter, text, |_, c| if c.is_lowercase() { Case::Upper } else { Case::Lower }),
        "capitalize" => changed(meter, text, |before, _| if before.is_none() { Case::Title } else { Case::Lower }),
        "title" => {
            changed(meter, text, |before, _| if before.is_some_and(is_cased) { Case::Lower } else { Case::Title })
        }
        _ => changed(meter, text, |_, _| Case::Lower),
    }
}

/// The filter `title`: unlike the method, a word begins only after white space, a dash or an opening bracket.
pub(super) fn title_of_words(meter: &Rc<Meter>, text: &str) -> Result<Value, Error> {
    let begins = |before: Option<char>| before.is_none_or(|c| c.is_whitespace() || "-({[<".contains(c));
    changed(meter, text, |before, _| if begins(before) { Case::Upper } else { Case::Lower })
}

enum Case {
    Upper,
    Lower,
    /// Of the capitals of a character, such as the two of `'\u{df}'`, only the first is one.
    Title,
    Folded,
}

/// Changes each character to a case that depends on the character before it, and on itself.
fn changed(meter: &Rc<Meter>, text: &str, case: impl Fn(Option<char>, char) -> Case) -> Result<Value, Error> {
    let mut changed = TextBuilder::new(meter)?;
    let mut before = None;
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        match case(before, character) {
            Case::Upper => character.to_uppercase().try_for_each(|c| changed.push(c))?,
            // Sigma has another form at the end of a word.
            Case::Lower
                if character == '\u{3a3}'
                    && before.is_some_and(char::is_alphabetic)
                    && !characters.peek().is_some_and(|c| c.is_alphabetic()) =>
            {
                changed.push('\u{3c2}')?;
            }
            Case::Lower => character.to_lowercase().try_for_each(|c| changed.push(c))?,
            Case::Title => {
                let mut capitals = character.to_uppercase();
                capitals.next().into_iter().try_for_each(|c| changed.push(c))?;
                capitals.flat_map(char::to_lowercase).try_for_each(|c| changed.push(c))?;
            }
            Case::Folded => {
                character.to_uppercase().flat_map(char::to_lowercase).try_for_each(|c| changed.push(c))?;
            }
        }
        before = Some(character);
    }
    Ok(changed.finish())
}
