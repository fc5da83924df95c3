//! `ToolNames`: the names of a request's tools, which all APIs check alike.

use std::collections::HashSet;

use crate::error::ApiError;
use crate::excerpt::excerpt;

/// The maximum tools that a model is offered.
pub const TOOLS_MAX: usize = 512;
/// The maximum length of a name, as the model sees it.
pub const NAME_BYTES_MAX: usize = 256;

#[derive(Debug, Default)]
pub struct ToolNames(HashSet<String>);

impl ToolNames {
    /// Adds the name of one more tool. `at` is the field that contains it.
    pub fn add(&mut self, name: &str, at: &str) -> Result<(), ApiError> {
        if self.0.len() >= TOOLS_MAX {
            return Err(ApiError::invalid("tools", format!("there are more than {TOOLS_MAX} tools")));
        }
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(no_name(at));
        }
        if !self.0.insert(name.to_owned()) {
            return Err(ApiError::invalid(at, format!("there are two tools with the name `{}`", excerpt(name))));
        }
        Ok(())
    }
}

/// The error of a tool whose name cannot be used.
pub fn no_name(at: &str) -> ApiError {
    ApiError::invalid(at, format!("the name of a tool is a word of at most {NAME_BYTES_MAX} bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_short_word_and_no_two_tools_share_it() {
        let mut names = ToolNames::default();
        names.add("find", "a").unwrap();
        for name in ["find", "", "two words", "line\nbreak", "x\u{7}", &"x".repeat(NAME_BYTES_MAX + 1)] {
            assert_eq!(names.add(name, "tools[1].name").unwrap_err().param.as_deref(), Some("tools[1].name"), "{name}");
        }
        names.add(&"x".repeat(NAME_BYTES_MAX), "b").unwrap();
    }

    #[test]
    fn there_is_a_limit_on_their_number() {
        let mut names = ToolNames::default();
        (0..TOOLS_MAX).for_each(|number| names.add(&number.to_string(), "a").unwrap());
        assert_eq!(names.add("more", "a").unwrap_err().param.as_deref(), Some("tools"));
    }
}
