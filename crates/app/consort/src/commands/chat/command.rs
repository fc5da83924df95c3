//! The commands of a chat: lines that begin with `/`.

pub const HELP: &str = "\
/retry            answer the last message again
/clear            begin a new conversation
/system TEXT      set the system prompt; /system shows it, /system - removes it
/set NAME VALUE   set a sampling parameter; /set lists them, the value `default` takes one back
/save FILE        write the conversation to a file (JSON)
/load FILE        read a conversation from such a file
/help             list the commands
/exit             leave, as Ctrl-D does";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChatCommand<'a> {
    Help,
    Exit,
    Clear,
    Retry,
    ShowSystem,
    /// `None` removes it.
    System(Option<&'a str>),
    ShowSettings,
    Set {
        name: &'a str,
        value: &'a str,
    },
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
        let file = || if rest.is_empty() { Err(format!("{name} needs the name of a file")) } else { Ok(rest) };
        Ok(match name {
            "/help" | "/?" => Self::Help,
            "/exit" | "/quit" | "/bye" => Self::Exit,
            "/clear" => Self::Clear,
            "/retry" => Self::Retry,
            "/system" if rest.is_empty() => Self::ShowSystem,
            "/system" => Self::System((rest != "-").then_some(rest)),
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
    }

    #[test]
    fn what_is_missing_or_unknown_is_told() {
        for line in ["/set top_p", "/save", "/load ", "/sett", "/"] {
            assert!(matches!(ChatCommand::parse(line), Some(Err(_))), "{line}");
        }
        assert_eq!(ChatCommand::parse("what is /help?"), None);
    }
}
