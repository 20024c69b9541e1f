// A conversation as a file: JSON with all branches and images, or Markdown of the shown branch.

const NAMES = { user: "User", assistant: "Assistant", tool: "Tool" };

export function asJson(conversation) {
  const { record, messages, images } = conversation;
  return JSON.stringify({
    format: "penstock-conversation", version: 1, ...record,
    messages: [...messages.values()], images: [...images.values()],
  }, null, 2);
}

export function asMarkdown(conversation) {
  const parts = conversation.path().map((message) => {
    const calls = (message.toolCalls ?? []).map((call) => `\`\`\`json\n${JSON.stringify(call.function)}\n\`\`\``);
    const images = message.images.length ? [`*${message.images.length} image(s)*`] : [];
    return [`## ${NAMES[message.role]}`, ...images, message.content, ...calls].filter(Boolean).join("\n\n");
  });
  return `# ${conversation.title}\n\n${parts.join("\n\n")}\n`;
}

/** Offer a text as a file to save. */
export function download(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name.replace(/[^\p{L}\p{N} ._-]+/gu, "_").slice(0, 80);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
