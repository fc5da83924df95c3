//! The commands of a chat: lines that begin with `/`.

use super::attachment::unquoted;
use super::multi_line;

pub const HELP: &str = "\
/retry            answer the last message again
/clear            begin a new conversation
/system TEXT      set the system prompt; /system shows it, /system - removes it
/model NAME       go on with another model; /model shows which there are
/file FILE        make a text file part of the next message; @FILE in a message does the same
/set NAME VALUE   set a sampling parameter; /set lists them, the value `default` takes one back
/think on|off     have the model reason before it answers, or not; /think default leaves it to the model
/save FILE        write the conversation to a file (JSON)
/load FILE        read a conversation from such a file
/help             list the commands
/exit             leave, as Ctrl-D does

Ctrl-J, Alt-Enter, or a backslash before Enter begin a new line; \"\"\" opens and closes a message of several lines.
Tab completes. Ctrl-C or Esc stops an answer; what is typed during it is the next input.";

/// The commands that Tab completes. Those with an argument end with a space.
pub const NAMES: [&str; 11] =
    ["/clear", "/exit", "/file ", "/help", "/load ", "/model ", "/retry", "/save ", "/set ", "/system ", "/think "];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChatCommand<'a> {
    Help,
    Exit,
    Clear,
    Retry,
    ShowSystem,
    /// `None` removes it.
    System(Option<&'a str>),
    ShowModels,
    Model(&'a str),
    ShowFiles,
    File(&'a str),
    ShowSettings,
    Set {
        name: &'a str,
        value: &'a str,
    },
    /// `None` leaves it to the model.
    Think(Option<bool>),
    Save(&'a str),
    Load(&'a str),
}

impl<'a> ChatCommand<'a> {
    /// `None` if the line is a message to the model. The error is a sentence for the user.
    pub fn parse(line: &'a str) -> Option<Result<Self, String>> {
        let line = line.trim();
        line.starts_with('/').then(|| Self::parse_command(line))
    }

    fn parse_command(line: &'a str) -> Result<Self, String> {
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        let file =
            || if rest.is_empty() { Err(format!("{name} needs the name of a file")) } else { Ok(unquoted(rest)) };
        Ok(match name {
            "/help" | "/?" => Self::Help,
            "/exit" | "/quit" | "/bye" => Self::Exit,
            "/clear" => Self::Clear,
            "/retry" => Self::Retry,
            "/system" if rest.is_empty() => Self::ShowSystem,
            "/system" => {
                let text = multi_line::unquoted(rest).unwrap_or(rest);
                Self::System(Some(text).filter(|&text| text != "-" && !text.trim().is_empty()))
            }
            "/model" if rest.is_empty() => Self::ShowModels,
            "/model" => Self::Model(rest),
            "/file" if rest.is_empty() => Self::ShowFiles,
            "/file" => Self::File(unquoted(rest)),
            "/think" => match rest {
                "" | "on" => Self::Think(Some(true)),
                "off" => Self::Think(Some(false)),
                "default" => Self::Think(None),
                _ => return Err(format!("/think {rest}: it is on, off or default")),
            },
            "/set" if rest.is_empty() => Self::ShowSettings,
            "/set" => match rest.split_once(char::is_whitespace) {
                Some((name, value)) => Self::Set { name, value: value.trim() },
                None => return Err(format!("/set {rest} needs a value, or `default`")),
            },
            "/save" => Self::Save(file()?),
            "/load" => Self::Load(file()?),
            _ => return Err(format!("{name} is no command; /help lists them")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str, expected: ChatCommand<'_>) {
        assert_eq!(ChatCommand::parse(line), Some(Ok(expected)), "{line}");
    }

    #[test]
    fn a_command_may_have_a_text() {
        check("/retry", ChatCommand::Retry);
        check("/system  Speak like a pirate. ", ChatCommand::System(Some("Speak like a pirate.")));
        check("/system", ChatCommand::ShowSystem);
        check("/system -", ChatCommand::System(None));
        check("/set", ChatCommand::ShowSettings);
        check("/set top_p  0.5", ChatCommand::Set { name: "top_p", value: "0.5" });
        check("/save my chat.json", ChatCommand::Save("my chat.json"));
        check("/load \"my chat.json\"", ChatCommand::Load("my chat.json"));
        check("/file \"a b\"", ChatCommand::File("a b"));
        check("/file", ChatCommand::ShowFiles);
        check("/model a/b:Q4_0", ChatCommand::Model("a/b:Q4_0"));
        check("/model", ChatCommand::ShowModels);
        check("/think off", ChatCommand::Think(Some(false)));
        check("/think", ChatCommand::Think(Some(true)));
        check("/system \"\"\"a\nb\"\"\"", ChatCommand::System(Some("a\nb")));
    }

    #[test]
    fn what_is_missing_or_unknown_is_told() {
        for line in ["/set top_p", "/save", "/load ", "/sett", "/think x", "/"] {
            assert!(matches!(ChatCommand::parse(line), Some(Err(_))), "{line}");
        }
        assert_eq!(ChatCommand::parse("what is /help?"), None);
    }

    #[test]
    fn every_name_is_a_command_that_help_lists() {
        for name in NAMES {
            let argument = if name == "/think " { "on" } else { "x y" };
            let line = if name.ends_with(' ') { format!("{name}{argument}") } else { name.to_owned() };
            assert!(matches!(ChatCommand::parse(&line), Some(Ok(_))), "{line}");
            assert!(HELP.contains(name), "{name}");
        }
    }
}
