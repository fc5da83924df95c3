//! The files of the folder `page`, as they are written.

macro_rules! page {
    ($path:literal) => {
        include_str!(concat!("../../page/", $path))
    };
}

macro_rules! modules {
    ($($path:literal)*) => { &[$(($path, page!($path))),*] };
}

macro_rules! fonts {
    ($($name:literal)*) => { &[$(($name, include_bytes!(concat!("../../page/katex/fonts/", $name)) as &[u8])),*] };
}

pub const INDEX: &str = page!("index.html");
pub const ICON: &str = page!("icon.svg");
/// The one script that is part of `index.html`: it runs before the first paint.
pub const FIRST_PAINT: &str = page!("first-paint.js");

/// In the order in which they apply.
pub const STYLES: &[&str] = &[
    page!("style/base.css"),
    page!("style/frame.css"),
    page!("style/chat.css"),
    page!("style/markdown.css"),
    page!("style/dialog.css"),
    page!("style/status.css"),
    page!("style/cluster.css"),
];

/// KaTeX 0.19.1, copied from npm by `vendor-katex.sh`.
pub const KATEX: &str = page!("katex/katex.min.js");
pub const KATEX_LICENCE: &str = page!("katex/LICENSE");
pub const KATEX_STYLE: &str = page!("katex/katex.min.css");
pub const FONTS_LICENCE: &str = page!("katex/fonts/LICENSE");

/// Names and bytes.
pub const FONTS: &[(&str, &[u8])] = fonts! {
    "KaTeX_AMS-Regular.woff2"
    "KaTeX_Caligraphic-Bold.woff2"
    "KaTeX_Caligraphic-Regular.woff2"
    "KaTeX_Fraktur-Bold.woff2"
    "KaTeX_Fraktur-Regular.woff2"
    "KaTeX_Main-Bold.woff2"
    "KaTeX_Main-BoldItalic.woff2"
    "KaTeX_Main-Italic.woff2"
    "KaTeX_Main-Regular.woff2"
    "KaTeX_Math-BoldItalic.woff2"
    "KaTeX_Math-Italic.woff2"
    "KaTeX_SansSerif-Bold.woff2"
    "KaTeX_SansSerif-Italic.woff2"
    "KaTeX_SansSerif-Regular.woff2"
    "KaTeX_Script-Regular.woff2"
    "KaTeX_Size1-Regular.woff2"
    "KaTeX_Size2-Regular.woff2"
    "KaTeX_Size3-Regular.woff2"
    "KaTeX_Size4-Regular.woff2"
    "KaTeX_Typewriter-Regular.woff2"
};

/// Paths and sources.
pub const MODULES: &[(&str, &str)] = modules! {
    "app/announcer.js"
    "app/answer.js"
    "app/api.js"
    "app/attachments.js"
    "app/chain.js"
    "app/chat.js"
    "app/clipboard.js"
    "app/cluster-view.js"
    "app/composer.js"
    "app/context-meter.js"
    "app/context.js"
    "app/conversation.js"
    "app/dialogs.js"
    "app/dom.js"
    "app/drafts.js"
    "app/files.js"
    "app/icons.js"
    "app/import.js"
    "app/invitation.js"
    "app/main.js"
    "app/markdown/blocks.js"
    "app/markdown/highlight.js"
    "app/markdown/inline.js"
    "app/markdown/links.js"
    "app/markdown/live.js"
    "app/markdown/maths.js"
    "app/markdown/render.js"
    "app/memory.js"
    "app/message.js"
    "app/model-picker.js"
    "app/nodes.js"
    "app/pdf/fonts.js"
    "app/pdf/objects.js"
    "app/pdf/text.js"
    "app/plot.js"
    "app/qr.js"
    "app/ranks.js"
    "app/search.js"
    "app/server.js"
    "app/settings.js"
    "app/shortcuts.js"
    "app/sidebar.js"
    "app/sse.js"
    "app/state.js"
    "app/status-view.js"
    "app/store.js"
    "app/theme.js"
    "app/timeline.js"
    "app/toast.js"
    "app/tones.js"
    "app/transcript.js"
    "app/units.js"
    "app/words.js"
};

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// The files below a folder whose names end like this, relative to it.
    fn list(folder: &Path, ending: &str, found: &mut Vec<String>, prefix: &str) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let name = format!("{prefix}{}", entry.file_name().to_str().unwrap());
            if entry.path().is_dir() {
                list(&entry.path(), ending, found, &format!("{name}/"));
            } else if name.ends_with(ending) {
                found.push(name);
            }
        }
        found.sort_unstable();
    }

    #[test]
    fn every_file_of_the_folder_is_embedded() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("page");
        let files = |below: &str, ending: &str, prefix: &str| {
            let mut found = Vec::new();
            list(&folder.join(below), ending, &mut found, prefix);
            found
        };
        assert_eq!(files("app", ".js", "app/"), MODULES.iter().map(|(path, _)| *path).collect::<Vec<_>>());
        assert_eq!(files("katex/fonts", ".woff2", ""), FONTS.iter().map(|(name, _)| *name).collect::<Vec<_>>());
        let mut styles: Vec<_> = files("style", ".css", "style/")
            .iter()
            .map(|path| std::fs::read_to_string(folder.join(path)).unwrap())
            .collect();
        let mut embedded = STYLES.to_vec();
        styles.sort_unstable();
        embedded.sort_unstable();
        assert_eq!(styles, embedded);
    }
}
