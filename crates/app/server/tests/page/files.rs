//! Files of text that go with a message.

use serde_json::json;

use crate::{complete, on_page, pick, send};

#[test]
fn files_are_sent_as_fenced_blocks() {
    on_page(|site, tab| {
        assert_eq!(tab.eval("document.querySelector('#send').disabled"), true);
        pick(tab, "#pick-files", &[("a.py", "print(1)\n"), ("notes.md", "```\ncode\n```")]);
        tab.wait("document.querySelectorAll('#attached .chip').length === 2");
        assert_eq!(tab.eval("document.querySelector('#send').disabled"), false, "files alone can be sent");
        pick(tab, "#pick-files", &[("b.txt", "gone")]);
        tab.wait("document.querySelectorAll('#attached .chip').length === 3");
        tab.picture("files");
        tab.click("[aria-label='Remove b.txt']");
        tab.wait("document.querySelectorAll('#attached .chip').length === 2");

        let asked = send(site, tab, "What is this?");
        let files = "a.py:\n```py\nprint(1)\n```\n\nnotes.md:\n````md\n```\ncode\n```\n````";
        assert_eq!(asked.body["messages"][0]["content"], format!("What is this?\n\n{files}"));
        complete(tab, asked.answer(), "A program");
        assert_eq!(tab.count("#attached .chip"), 0);
        assert_eq!(tab.text(".user .body"), "What is this?");
        assert_eq!(tab.count(".user .chips li"), 2);
        // An edit keeps the files.
        tab.click(".user [data-edit]");
        tab.fill(".edit textarea", "Explain");
        tab.press("Enter");
        let asked = site.asked();
        assert_eq!(asked.body["messages"][0]["content"], format!("Explain\n\n{files}"));
        complete(tab, asked.answer(), "It prints");
        tab.picture("files-sent");
    });
}

#[test]
fn files_are_dropped_and_only_text_of_a_bounded_size_is_taken() {
    on_page(|site, tab| {
        let drop_file = |contents: &str| {
            tab.eval(&format!(
                "(() => {{
                    const dataTransfer = new DataTransfer();
                    dataTransfer.items.add(new File([{contents}], 'dropped.bin'));
                    const target = document.querySelector('#transcript');
                    for (const type of ['dragover', 'drop'])
                        target.dispatchEvent(new DragEvent(type, {{ dataTransfer, bubbles: true, cancelable: true }}));
                }})()"
            ));
        };
        drop_file("new Uint8Array([0xff, 0xfe, 0x00])");
        tab.wait_text(".toast", "dropped.bin is not a text file in UTF-8.");
        drop_file("'\\0'");
        tab.wait_text(".toast", "dropped.bin is not a text file.");
        drop_file("'x'.repeat(300 << 10)");
        tab.wait_text(".toast", "dropped.bin is larger than 256 KiB.");
        assert_eq!(tab.count("#attached .chip"), 0);
        drop_file("'plain words'");
        tab.wait("document.querySelectorAll('#attached .chip').length === 1");
        tab.click("#send");
        let asked = site.asked();
        let sent = json!([{ "role": "user", "content": "dropped.bin:\n```bin\nplain words\n```" }]);
        assert_eq!(asked.body["messages"], sent);
        complete(tab, asked.answer(), "Words");
        assert_eq!(tab.text("#conversations [aria-current]"), "dropped.bin");
    });
}
