//! `Style`: how a piece of text looks in a terminal, and `Span`, such a piece.

/// Attributes of text. The default one is plain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Style {
    pub bold: bool,
    pub dim: bool,
    pub italic: bool,
    pub underline: bool,
    pub strike: bool,
    /// The colour of code.
    pub code: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    pub text: String,
    pub style: Style,
}

impl Style {
    pub const PLAIN: Self =
        Self { bold: false, dim: false, italic: false, underline: false, strike: false, code: false };
    pub const DIM: Self = Self { dim: true, ..Self::PLAIN };
    pub const BOLD: Self = Self { bold: true, ..Self::PLAIN };
    pub const ITALIC: Self = Self { italic: true, ..Self::PLAIN };
    pub const UNDERLINE: Self = Self { underline: true, ..Self::PLAIN };
    pub const STRIKE: Self = Self { strike: true, ..Self::PLAIN };
    pub const CODE: Self = Self { code: true, ..Self::PLAIN };

    /// The attributes of both.
    pub fn and(self, other: Self) -> Self {
        Self {
            bold: self.bold || other.bold,
            dim: self.dim || other.dim,
            italic: self.italic || other.italic,
            underline: self.underline || other.underline,
            strike: self.strike || other.strike,
            code: self.code || other.code,
        }
    }

    /// The escape sequence that changes any style to this one.
    pub fn sequence(self) -> String {
        let attributes = [
            (self.bold, ";1"),
            (self.dim, ";2"),
            (self.italic, ";3"),
            (self.underline, ";4"),
            (self.strike, ";9"),
            (self.code, ";36"),
        ];
        let codes: String = attributes.into_iter().filter_map(|(is_set, code)| is_set.then_some(code)).collect();
        format!("\u{1b}[0{codes}m")
    }

    /// A text in this style, on its own.
    pub fn paint(self, text: &str) -> String {
        match self == Self::PLAIN || text.is_empty() {
            true => text.to_owned(),
            false => format!("{}{text}{}", self.sequence(), Self::PLAIN.sequence()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_style_replaces_any_other() {
        assert_eq!(Style::BOLD.and(Style::CODE).sequence(), "\u{1b}[0;1;36m");
        assert_eq!(Style::PLAIN.sequence(), "\u{1b}[0m");
        assert_eq!(Style::DIM.paint("a"), "\u{1b}[0;2ma\u{1b}[0m");
        assert_eq!(Style::PLAIN.paint("a"), "a");
    }
}
