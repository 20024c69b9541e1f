"""Short stories and descriptions in English and Chinese, generated with a small grammar.

A template is a sentence with two kinds of placeholders: ``[warm|cold]`` is a choice, and ``[weather]`` a choice from
the list of that name; ``{name}``, ``{item}``, … are from the cast, which is fixed for a story.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from .base import Check, Exchange, Split, is_chinese, one_of
from .lexicon import ANIMALS, CITIES, COLOURS, ITEMS, JOBS, NAMES_EN, NAMES_ZH, PLACES

Templates = tuple[str, ...]
Words = Mapping[str, str]

CHINESE_SHARE = 0.35
FREE_SHARE = 0.25
"""Share of story requests without a subject."""

MOST_SENTENCES = 9

# --- The cast -------------------------------------------------------------------------------------------------------

GIRLS = frozenset(
    "Anna Clara Emma Grace Iris Kate Mira Olga Rosa Tara Wendy Bella Diana Fiona Hanna Julia Laura Nina Ruth Tina "
    "Alice Cora Elsa Gina Ida Lily Nora Rita Sarah Vera "
    "小红 小丽 小芳 小美 小云 小雪 阿梅 阿珍 王芳 陈静 赵敏 吴娟 徐丽 朱琳".split()
)
MEASURES = {
    "书": "本", "钢笔": "支", "台灯": "盏", "钟": "个", "钥匙": "把", "杯子": "个", "勺子": "把", "镜子": "面",
    "蜡烛": "支", "篮子": "个", "瓶子": "个", "盒子": "个", "外套": "件", "帽子": "顶", "手套": "只", "围巾": "条",
    "球": "个", "风筝": "只", "鼓": "面", "吉他": "把", "相机": "个", "收音机": "个", "地图": "张", "硬币": "个",
    "戒指": "个", "绳子": "条", "花": "朵", "石头": "块", "贝壳": "个", "羽毛": "根", "雨伞": "把",
    "马": "匹", "牛": "头", "大象": "头", "蛇": "条", "猪": "头",
}  # fmt: skip
"""Chinese measure words of items; these are the items that a hero can carry."""
THINGS = [pair for pair in ITEMS if pair[1] in MEASURES]
BEASTS = [pair for pair in ANIMALS if pair[0] not in ("whale", "shark")]
ON_OR_AT = {"station": "at", "market": "at", "harbour": "at", "river": "by", "beach": "on", "mountain": "on",
            "farm": "on", "bridge": "on"}  # fmt: skip

# --- English stories ------------------------------------------------------------------------------------------------

LISTS_EN: Words = {
    "trait": "a small|a kind|a brave|a quiet|a clever|a young|a happy|a shy|a busy|a friendly",
    "time": "morning|evening|afternoon|day",
    "weather": "cold|warm|bright|windy|quiet|grey|clear",
    "family": "mother|father|grandmother|brother|sister",
    "spot": "under the bed|behind the house|in the tall grass|beside the road|under an old tree|behind the wall"
            "|under the leaves|behind the door",
    "joy": "danced|sang|laughed|smiled|jumped",
    "move": "walked|ran|hurried|went",
    "hobby": "sing|dance|read|climb|draw|run|cook|dream|count the stars|listen to old songs|sit in the sun",
    "love": "the rain|the stars|old songs|long walks|sweet cake|warm bread|the snow|the wind|the sea|good stories",
}  # fmt: skip
OPENINGS_EN: Templates = (
    "Once upon a time, [trait] {kind} called {name} lived near the {place}.",
    "Near the {place} lived [trait] {kind}. {His} name was {name}.",
    "There was once [trait] {kind} called {name} who lived by the {place}.",
    "Long ago, {name} the {kind} lived in a [small|white|quiet|big] house near the {place}.",
    "{name} was [trait] {kind} who [often played|liked to walk|sang every day|worked hard] near the {place}.",
    "One [weather] [time], [trait] {kind} called {name} came to the {place}.",
    "Everybody near the {place} knew {name}, [trait] {kind}.",
    "This is the story of {name}, [trait] {kind} who lived near the {place}.",
    "Every [time], [trait] {kind} called {name} [walked to|ran to|looked at] the {place}.",
    "In a [small|tall|white|quiet] house [beside|behind|near] the {place} lived [trait] {kind} called {name}.",
    "When the [sun|moon] came up over the {place}, [trait] {kind} called {name} was already awake.",
    "It was [summer|winter|spring|autumn], and {name} the {kind} was [walking|sitting|singing] {at}.",
    "[A long time|A hundred years|Many years] ago, [trait] {kind} called {name} lived near the {place}.",
    "Do you know {name}? {He} was [trait] {kind} and lived near the {place}.",
    "The [sun|moon|first star] was [high|bright] above the {place} when {name}, [trait] {kind}, came out to [hobby].",
    "{name} the {kind} had lived near the {place} [all {his} life|for many years|since the spring].",
    "It was a [weather] [time] {at}, and {name}, [trait] {kind}, had nothing to do.",
    "If you go to the {place}, people will tell you about {name}, [trait] {kind}.",
)
TRAITS_EN: Templates = (
    "{He} was [quiet|shy|not very strong|not very tall], but {he} had a [big|warm|kind|brave] heart.",
    "{He} loved [love] and [love].",
    "{name} never [told a lie|said no|gave up|got angry].",
    '{His} [family] always said, "[Be kind|Be brave|Look twice|Take your time|Listen first|Never give up]."',
    "{He} had [bright|dark|kind] eyes and a [loud|soft|happy|clear] [voice|laugh].",
    "Everybody said that {he} was the best {kind} they knew.",
    "{He} liked to [hobby] more than anything else.",
    "Most days {he} liked to [hobby] and dream of [love].",
    "{He} was often [alone|tired|hungry|busy|late], but {he} was never [sad for long|angry|afraid to ask].",
    "{He} asked [a hundred questions|many questions|a new question] every day.",
    "{His} favourite time of the day was the [early morning|late evening|quiet afternoon].",
    "Nobody could [run|sing|laugh|jump|dance] like {name}.",
    "At night {he} dreamed of [love].",
    "{His} [family] had taught {him} to [hobby].",
)
MEETINGS_EN: Templates = (
    "Then {a_pal} came [down the road|out of the trees|around the corner|over the hill].",
    "Just then {name} met {a_pal}.",
    "{A_pal} [saw|heard] {him} and stopped.",
    "Then {he} heard a [soft|loud|deep|friendly] voice: it was {a_pal}.",
    "Near the road sat {a_pal} and [sang|smiled|waited].",
    "After a while {a_pal} came and sat down beside {him}.",
    "That [time], {a_pal} knocked at {his} door.",
    "By good luck {a_pal} lived [close by|behind the next hill|in the next house].",
    "{He} turned around, and there stood {a_pal}.",
    "But {name} was not alone, because {a_pal} had seen everything.",
    "[At last|Soon|The next day] {he} told everything to {a_pal}.",
    "A little later, {a_pal} [walked|came|ran] past.",
    "There, [behind a tree|on a stone|beside the gate], {he} found {a_pal}.",
)
OFFERS_EN: Templates = (
    '"[Let me help you|I will help you|I know what to do|We can do it together]," said the {pal}.',
    '"[Why are you so quiet|What is wrong|Can I help you]?" asked the {pal}.',
    '"[Do not cry|Do not be sad|Come with me|Do not give up]," said the {pal}[| with a smile| in a soft voice].',
    "The {pal} [listened for a long time|thought for a moment|sat very still] and then [had an idea|smiled].",
    '"Two are [better|stronger] than one," said the {pal}.',
    "The {pal} had [kind|bright|wise] eyes, and {name} [was glad|smiled].",
    '{name} asked for help, and the {pal} said, "[Yes|Of course|I will]!"',
    "",
)
ENDINGS_EN: Templates = (
    "{name} was so [happy|glad] that {he} [joy] all the way home.",
    "That [evening|night] they ate [warm bread|sweet cake|hot soup] and [joy] together.",
    "{name} gave the {pal} [a warm cake|half of {his} bread].",
    "Then they went home under [the stars|the moon|the evening sun].",
    "From that day on, {name} and the {pal} were [best friends|good friends|always together].",
    "And the {item}? It still [stands|lies] [beside {his} bed|near the window|in {his} room] today.",
    "{name} slept [well|very well|long and deep] that night.",
    "The whole {place} was full of [songs|light] that [evening|night].",
    "Even today, people {at} [tell|remember] the story of {name} and the {item}.",
    "{name} [joy], the {pal} [joy], and [the sun|the moon] seemed to smile too.",
    '"[Thank you|What a day|We did it], my friend," said {name}.',
    "When {he} came home, {his} [family] [smiled|was very glad|had made hot soup].",
    "Every year on that day, {name} and the {pal} meet {at} and [drink tea|sing|eat cake].",
    "After that, {name} was never [alone|sad] again.",
)
MORALS_EN: Templates = (
    "So {name} learned that {truth}.",
    "{He} never forgot that {truth}.",
    "Since then, {name} has known that {truth}.",
    'As the {pal} liked to say, "Remember that {truth}."',
    "And it is true: {truth}.",
    "Now everybody {at} knows that {truth}.",
    "", "", "",
)  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """Plot of a story: what the hero has or wants, what goes wrong, and the happy ending."""

    wish: Templates
    trouble: Templates
    solution: Templates
    truth: Templates


LOST_EN = Plot(
    wish=(
        "One [time], {his} {c_item} was gone.",
        "{name} had {a_item} from {his} [family], but one day {he} could not find it.",
        "On the way [home|to school|to the market], {he} lost {his} {c_item}.",
        "One night a strong wind carried {his} {c_item} away.",
        "{He} had {a_item} and loved it, but one [time] it was not [in its place|by the door|beside the bed].",
        "Then something sad happened: {his} {c_item} was lost.",
    ),
    trouble=(
        "{He} looked [spot] and [spot], but the {item} was not there.",
        "{He} looked [all day|for three days|until night] and found [only an old shoe|only leaves|nothing].",
        "{He} asked everybody {he} met, but nobody had seen the {item}.",
        "{name} sat down [on a stone|under a tree|by the road] and began to cry.",
        "It grew dark, and {he} still did not know where the {item} was.",
        "The more {he} looked, the more tired {he} became.",
    ),
    solution=(
        "The {pal} found a small path in the [snow|sand|grass], and it led them to the {item}.",
        "They looked together, and soon they found the {item} [spot].",
        '"Think of the last place where you had it," said the {pal}, and so they found the {item} [spot].',
        "High up in a tree something shone: it was the {item}, and the {pal} got it down.",
        "A [little bird|little child|good neighbour] had kept the {item} safe and was glad to give it back.",
        "In the end they found the {item} [spot], and both of them laughed.",
    ),
    truth=(
        "four eyes see more than two", "lost things like to hide in easy places", "it is good to ask for help",
        "a friend is worth more than any {item}",
    ),
)  # fmt: skip
FRIEND_EN = Plot(
    wish=(
        "{He} had {a_item}, but no friend to share it with.",
        "{His} only toy was {a_item}, and {he} wanted a friend more than anything.",
        "{name} carried {a_item} everywhere, because it was {his} only friend.",
        "One day {he} put {a_item} in front of the house and waited for somebody to come.",
        "{He} wished for a friend to show {his} {c_item} to.",
    ),
    trouble=(
        "But the others were busy and had no time for {him}.",
        "But nobody [came|stopped|said hello], and the day was long.",
        "The other children laughed at the {item} and ran away.",
        "{He} was too shy to say hello.",
        "When {he} tried to speak, no word came out.",
        "Many people came, but all of them were in a hurry.",
    ),
    solution=(
        "{name} showed the {pal} the {item}, and they played with it until the evening.",
        'The {pal} looked at the {item} and said, "[How beautiful|I like it|What a fine {item}]! Shall we be friends?"',
        "They shared the {item}, and the afternoon was much too short.",
        '{name} asked in a soft voice, "Shall we be friends?", and the {pal} looked at the {item} and said yes.',
        "It turned out that the {pal} was alone too, and so they shared the {item} and [love].",
        "They talked about the {item}, about [love] and about everything else.",
    ),
    truth=(
        "one friend is enough to make a day bright", "a friend may live next door", "one hello can change everything",
        "sharing makes every {item} more beautiful",
    ),
)  # fmt: skip
JOURNEY_EN = Plot(
    wish=(
        "One day {he} took {a_item} and set out to see the world.",
        "{name} wanted to bring {a_item} to {his} [family], who lived far away.",
        "{He} had heard of {a_item} [behind the hills|at the end of the road|beyond the sea] and wanted to see it.",
        "In a dream {he} saw {a_item} on a high hill, so {he} [took some bread|put on {his} coat] and left.",
        "An old letter said that {a_item} was waiting for {him} [far away|behind the hills|by the sea].",
    ),
    trouble=(
        "The road was [long|dark|cold], and soon {his} feet hurt.",
        "After [two|three|five|seven] days {he} came to a [wide river|high wall] and could not go on.",
        "At the third corner {he} took the wrong road.",
        "The nights were cold, and {he} had only a little bread left.",
        "Heavy rain came down, and {he} could not see the road any more.",
        "The bridge was broken, and there was no other way.",
    ),
    solution=(
        "The {pal} knew [a shorter road|a safe way|a secret path], and in the end they found the right place "
        "and the {item}.",
        "Together they [walked|climbed] on until the sun came up, and the {item} shone in the new light.",
        "They helped each other over every [hill|river|wall], and at the end there was the {item}.",
        "With the {item} in front and the {pal} behind, {name} did the last part in one day.",
        "They sang the whole way, and then the road was not long at all: there was the {item}.",
    ),
    truth=(
        "every long road begins with one step", "a road is shorter with a friend", "home is best after a long road",
        "slow feet also arrive",
    ),
)  # fmt: skip
RAIN_EN = Plot(
    wish=(
        "One [time], {name} was outside with {a_item} when the rain began to fall.",
        "{He} had just cleaned {his} {c_item} when the sky turned black.",
        "{name} wanted to take {a_item} to {his} [family], but the clouds were dark.",
        "It had rained for [three|four|seven] days, and {name} sat at home with {a_item}.",
        "On the way home with {a_item}, {he} saw black clouds.",
    ),
    trouble=(
        "The rain [fell harder and harder|did not stop], and the road became a river.",
        "Soon {he} was wet from head to foot.",
        "The water rose and rose until it stood at the door.",
        "Then all the lights went out, and {name} [sat under a tree|closed {his} eyes|held the {item} tight].",
        "The wind was so strong that {he} nearly lost the {item}.",
        "There was no house and no light.",
    ),
    solution=(
        "They sat under a [big leaf|small roof|thick tree], put the {item} between them and told stories "
        "until the rain stopped.",
        "The {pal} led {him} to a dry [place|house|barn], and the {item} was dry too.",
        "Together they carried the {item} [up the hill|into the house], step by step.",
        "They waited, and when the sun came back the {item} shone like new.",
        "With the {item} and a little luck they stopped the water before night.",
    ),
    truth=(
        "after every rain comes the sun", "bad weather is good for stories", "every rain stops",
        "even a wet day can be a good day",
    ),
)  # fmt: skip
CONTEST_EN = Plot(
    wish=(
        "There was a big race that [time], and the prize was {a_item}.",
        "The winner of the [singing|running] contest would get {a_item}.",
        "{He} wanted to win the {c_item} that lay on the table.",
        "Once a year there was a contest {at}, and this time the prize was {a_item}.",
        '"Who can [sing|dance|jump|cook] best?" asked the judge. "The prize is {a_item}!"',
    ),
    trouble=(
        "But the others were [stronger|older|better], and they laughed at {name}.",
        "On the first day {he} fell and hurt {his} foot.",
        "{He} practised every day, but it never seemed to be enough.",
        "Just before the start, {his} hands began to shake.",
        "{He} was last, far behind all the others.",
        "The night before, {he} could not sleep at all.",
    ),
    solution=(
        "They practised together every [time], and in the end {name} won the {item}.",
        '"Do not look at the others," said the {pal}, and {name} went on until the {item} was {his_own}.',
        "{name} stopped to help a child who had lost the way, and for that the judge gave {him} the {item}.",
        "{name} came second, but the winner smiled and shared the {item} with {him} and the {pal}.",
        "The {pal} [called|sang] so loudly that {name} forgot {his} fear and won the {item}.",
    ),
    truth=(
        "the prize is not everything", "every day makes you stronger", "a kind heart is the best prize",
        "the last can still be the best",
    ),
)  # fmt: skip
SECRET_EN = Plot(
    wish=(
        "One [time], {he} found {a_item} [spot].",
        "In {his} room {name} kept {a_item}, and nobody knew where it came from.",
        '{His} [family] gave {him} {a_item} and said, "There is a secret in it."',
        "Every night {he} heard a soft song from {a_item}.",
        "{name} saw that {his} {c_item} [shone|sang|grew warm] when the moon was full.",
    ),
    trouble=(
        "{He} looked at it again and again, but {he} did not know what it was.",
        "{He} wanted to tell somebody, but {he} was afraid that everybody would laugh.",
        "One day the {item} was suddenly [cold|dark|heavy], and {name} did not know why.",
        "The secret was so big that {he} could not sleep.",
        "A big man came and asked about the {item}, and {name} ran away.",
        "{He} wanted to tell nobody, and that was hard.",
    ),
    solution=(
        "The {pal} found [a small letter|a little map|a little star] in the {item}, and on it stood: "
        "[Be happy|You are not alone|Love is light].",
        "They waited for the full moon, and then the {item} [began to sing|shone like a star].",
        "{name} told the secret of the {item} at last, and {his} heart was light again.",
        "Together they found out that the {item} had once been the gift of {his} [family].",
        "The {pal} knew the old song of the {item}, and when they sang it, [every flower opened|the stars came out].",
    ),
    truth=(
        "two can carry a secret better than one", "small things can have big secrets", "it is good to have a friend",
        "the best secrets want to be shared",
    ),
)  # fmt: skip
GIFT_EN = Plot(
    wish=(
        "It was nearly the birthday of {his} [family], and {a_item} was just the right gift.",
        "{He} had seen {a_item} at the shop and wanted to give it to {his} [family].",
        "{name} wanted to make {a_item} with {his} own hands, as a gift for {his} [family].",
        "On {his} birthday {name} got {a_item}, but there was no name on it.",
        "{name} had {a_item} and wanted to give it to somebody who needed it.",
    ),
    trouble=(
        "But {he} had only [two|three|four] coins.",
        "But when {he} carried the {item} home, it fell and broke.",
        "The shop was already closed, and the day was nearly over.",
        "{He} worked all night, but the {item} did not look right.",
        "{He} did not know [what to do|whom to ask|where to begin], and time was short.",
        "The box was too small, and the paper was old.",
    ),
    solution=(
        "The {pal} [held the {item}|brought some paper|found red paper], {name} did the rest, "
        "and the gift was [ready|beautiful].",
        "They worked together until the {item} was as good as new.",
        "{name} worked for the {pal} for a day, and in return the {pal} gave {him} the {item}.",
        "They carried the {item} from door to door until they found a child who smiled.",
        "With a little [paint|paper] and a lot of love, the {item} became the best gift of all.",
    ),
    truth=(
        "a gift comes from the heart", "a gift makes two people happy", "love does not need much money",
        "the best gifts are made by hand",
    ),
)  # fmt: skip
FEAR_EN = Plot(
    wish=(
        "But {he} was afraid of [the dark|deep water|high places], and {his} {c_item} was on the other side.",
        "{His} [family] asked {him} to get {a_item} [at night|from the dark house|from the other side of the hill].",
        "{He} needed {a_item}, but it was in a [dark|cold] room.",
        "When the light went out, {he} always held {his} {c_item} in both hands.",
        "People said that {a_item} lay in the old tower, but {name} was afraid to go there.",
    ),
    trouble=(
        "{His} heart beat loudly, and {his} feet did not want to move.",
        "Something [knocked|moved] in the dark, and {name} stood still.",
        "Three times {he} tried, and three times {he} turned back.",
        "{He} was shy and told nobody.",
        "The others were not afraid, and that made {him} sad.",
        "{He} thought of [big teeth|cold hands] and began to shake.",
    ),
    solution=(
        "They went in step by step, and it was only [the wind|an old clock|a little bird]; then {name} took "
        "the {item}.",
        "The {pal} was afraid too, so they held on to each other and got the {item}.",
        '"Even a brave heart is afraid," said the {pal}, and {name} went and came back with the {item}.',
        "They sang a loud song, and with every word the fear was smaller, until the {item} was in {his} hands.",
        "{name} closed {his} eyes, took one step and then one more, and there was the {item}.",
    ),
    truth=(
        "fear is small when you look at it", "brave people are afraid too",
        "the dark is only a place without light",
        "one small step is enough",
    ),
)  # fmt: skip
PLOTS_EN = (LOST_EN, FRIEND_EN, JOURNEY_EN, RAIN_EN, CONTEST_EN, SECRET_EN, GIFT_EN, FEAR_EN)

FREE_REQUESTS_EN: Templates = (
    "Tell me a story.", "Please tell me a story.", "Can you tell me a story?", "Write a short story.",
    "A story, please.",
    "I want to hear a story.", "Tell me a short story.", "Make up a story for me.", "Do you know a story?",
    "Write a story for children.", "I would like a story.", "Tell me something nice before I sleep.",
)  # fmt: skip
REQUESTS_EN: Templates = (
    "Tell me a story about {what}.", "Write a short story about {what}.", "Can you tell me a story about {what}?",
    "Please tell me a story about {what}.", "Make up a story about {what}.", "I want a story about {what}.",
    "Tell a short story about {what}.", "I would like to hear a story about {what}.", "A story about {what}, please.",
    "Write a story about {what}.",
)  # fmt: skip

# --- Chinese stories ------------------------------------------------------------------------------------------------

LISTS_ZH: Words = {
    "trait": "小小的|热心的|勇敢的|安静的|聪明的|年轻的|快乐的|快乐的|可爱的|好心的",
    "time": "早上|晚上|下午|一天",
    "family": "妈妈|爸爸|奶奶|爷爷|哥哥|姐姐",
    "spot": "床下|门后|树下|草丛里|路边|墙后面|石头后面",
    "hobby": "唱歌|跳舞|看书|画画|跑步|做饭|数星星|听老歌|晒太阳",
    "love": "雨天|星星|老歌|雪花|大海|春风|甜甜的蛋糕|好听的故事",
}
OPENINGS_ZH: Templates = (
    "从前，{place}附近住着{one}[trait]{kind}，名叫{name}。",
    "很久很久以前，有{one}[trait]{kind}叫{name}，住在{place}旁边。",
    "{name}是{one}[trait]{kind}，家就在{place}附近。",
    "一个[晴朗|寒冷|温暖|安静]的[早上|晚上|下午]，{one}叫{name}的{kind}来到{at}。",
    "在{place}旁边的[小|白|老|木头]房子里，住着{one}[trait]{kind}，名字叫{name}。",
    "住在{place}附近的人都认识{name}，{one}[trait]{kind}。",
    "那年[春天|夏天|秋天|冬天]，{one}[trait]{kind}来到{place}旁边，{ta}叫{name}。",
    "每天[早上|晚上|下午]，{one}叫{name}的{kind}都会在{at}[散步|唱歌|看天|等人]。",
    "你认识{name}吗？{ta}是{one}[trait]{kind}，住在{place}附近。",
    "[太阳|月亮]刚刚出来，{one}叫{name}的{kind}就来到了{at}。",
    "这是{name}的故事，{ta}是{one}[trait]{kind}，常常在{at}玩。",
    "有一年[春天|夏天|秋天|冬天]，{at}来了{one}[trait]{kind}，叫{name}。",
)
TRAITS_ZH: Templates = (
    "{ta}最喜欢[hobby]。", "{ta}喜欢[love]，也喜欢[love]。", "{ta}每天都[hobby]，从不[生气|放弃]。",
    "{ta}的[family]常说：“[要勇敢|要热心|慢慢来|先听别人说]。”", "{ta}个子不高，心却很[大|暖|热|勇敢]。",
    "大家都说{ta}的[声音|笑声]很好听。", "{ta}每天都有很多问题。", "{ta}常常一个人[hobby]。",
    "到了夜里，{ta}会梦见[love]。", "{ta}的眼睛[又大又圆|像星星一样亮]。", "没有人比{ta}更爱[hobby]。",
    "{ta}很忙，可是很爱帮助别人。",
)  # fmt: skip
MEETINGS_ZH: Templates = (
    "这时，{a_pal}走了过来。", "就在这时，{ta}看见了{a_pal}。", "{a_pal}看见了，停了下来。",
    "这时，{ta}听见了{a_pal}的声音。", "路边正好坐着{a_pal}。", "过了一会儿，{a_pal}来到{ta}身边。",
    "那天晚上，{a_pal}来到门口。", "{ta}回头一看，是{a_pal}。", "第二天，{ta}把事情告诉了{a_pal}。",
    "还好，{a_pal}就住在旁边。", "不久，{a_pal}从树后走出来。", "原来，{a_pal}一直在看着{ta}。",
)  # fmt: skip
OFFERS_ZH: Templates = (
    "{pal}说：“[我来帮你|我们一起来|我有办法|别怕，有我在]！”", "{pal}问：“[你怎么了|要我帮忙吗|为什么不开心]？”",
    "“[别难过|别怕|别放弃|跟我来]。”{pal}[笑着|小声|温和地]说。", "{pal}想了想，[笑了|有了一个好主意|点点头]。",
    "{name}请{pal}帮忙，{pal}马上答应了。", "{pal}静静地听{ta}说完。", "",
)  # fmt: skip
ENDINGS_ZH: Templates = (
    "{name}高兴得[唱起歌来|跳了起来|笑了很久]。", "那天晚上，他们一起[吃蛋糕|喝热茶|看星星|唱歌]。",
    "{name}对{pal}说：“[谢谢你|你真好|今天真开心]！”", "从此，{name}和{pal}成了[好朋友|最好的朋友]。",
    "他们在[月光|星光|太阳]下一起走回家。", "那天夜里，{name}睡得很[香|好]。",
    "到今天，{item}还放在{name}的[床边|房间里|家里]。",
    "{at}的人到现在还在讲{name}和{item}的故事。", "回到家，{ta}的[family]笑了。",
    "每年的这一天，{name}都会和{pal}一起[唱歌|喝茶|看星星]。",
    "{name}再也不[难过了|怕了|是一个人了]。", "{name}笑了，{pal}也笑了。",
)  # fmt: skip
MORALS_ZH: Templates = (
    "{name}明白了：{truth}。", "从那以后，{ta}一直记得：{truth}。", "{pal}常说：“{truth}。”", "大家都说，{truth}。",
    "原来，{truth}。", "", "", "",
)  # fmt: skip

LOST_ZH = Plot(
    wish=(
        "一天，{ta_item}不见了。", "{ta}有{a_item}，可是有一天怎么也找不到了。",
        "回家的路上，{ta_item}不见了。",
        "夜里，一场大风把{ta_item}吹走了。", "[family]送给{ta}{a_item}，可是有一天它不见了。",
    ),
    trouble=(
        "{ta}在[spot]找，又到[spot]找，都没有。", "{ta}找了[一整天|三天|很久]，只找到几片树叶。",
        "{ta}问了很多人，谁也没看见。",
        "{ta}坐在[spot]，难过得哭了。", "天黑了，{item}还是没有找到。",
    ),
    solution=(
        "他们一起找，终于在[spot]找到了{item}。", "{pal}看见地上有小小的脚印，跟着走，就找到了{item}。",
        "“想一想最后在哪儿用过它。”{pal}说，后来{item}真的在[spot]。",
        "树上有东西在发光，原来就是{item}，{pal}把它拿了下来。",
        "原来一只小鸟一直看着{item}，高兴地还给了他们。",
    ),
    truth=("两个人找，比一个人快", "有困难就要问一问", "朋友比{item}更重要", "东西常常就在身边"),
)  # fmt: skip
FRIEND_ZH = Plot(
    wish=(
        "{ta}有{a_item}，可是没有朋友一起玩。", "{ta}只有{a_item}，很想有一个朋友。",
        "{ta}天天带着{a_item}，想有人来和{ta}说话。",
        "一天，{ta}把{a_item}放在门口，等人来看。", "{ta}很想找个朋友，一起看看{ta_item}。",
    ),
    trouble=(
        "可是大家都很忙，没有人停下来。", "可是{ta}不敢开口。", "别的孩子笑了笑，就跑开了。",
        "等了[一整天|很久|三天]，也没有人来。",
        "{ta}想说话，可是一个字也说不出来。",
    ),
    solution=(
        "{name}把{item}拿给{pal}看，他们一直玩到天黑。", "{pal}看着{item}说：“真好看，我们做朋友吧！”",
        "{name}小声问：“做我的朋友好吗？”{pal}点点头，看了看{item}。",
        "原来{pal}也没有朋友，他们就一起玩{item}，一起[hobby]。",
        "他们说着{item}，说着[love]，有说不完的话。",
    ),
    truth=("一个朋友就能让天变亮", "先说一声你好，就会有朋友", "好东西要一起分享", "朋友也许就在旁边"),
)  # fmt: skip
JOURNEY_ZH = Plot(
    wish=(
        "一天，{ta}带上{a_item}，出门去看世界。", "{ta}想把{a_item}送给远方的[family]。",
        "听说山的那边有{a_item}，{ta}很想去看看。",
        "{ta}梦见{a_item}在高高的山上，就出发了。", "一本老书说，{a_item}在远方等着{ta}。",
    ),
    trouble=(
        "路又[长|黑|远]又难走，{ta}的脚很疼。", "走了[两|三|五|七]天，前面是一条大河。",
        "走到第三个路口，{ta}走错了路。",
        "夜里很冷，吃的也快没有了。", "雨来了，{ta}什么也看不见。",
    ),
    solution=(
        "{pal}知道一条[小路|近路]，他们终于走到了，{item}也在那里。", "他们一起走到天亮，{item}在阳光下发光。",
        "他们一起，过了河，过了山，{item}一直好好的。", "他们一路唱歌，路就不远了，最后看见了{item}。",
        "{name}拿着{item}走在前面，{pal}跟在后面，一天就到了。",
    ),
    truth=("再长的路也要一步一步走", "有朋友，路就不远", "走得慢也能走到", "走得再远，家也最好"),
)  # fmt: skip
RAIN_ZH = Plot(
    wish=(
        "一天，{ta}带着{a_item}出门，这时下起了雨。", "{ta}刚拿出{c_item}，天就黑了下来。",
        "{ta}想把{a_item}送给[family]，天上却满是黑云。",
        "雨下了[三|四|七]天，{ta}和{a_item}一起在家里等。", "{ta}拿着{a_item}回家，路上听见了雷声。",
    ),
    trouble=(
        "雨越下越大，路变成了河。", "不一会儿，{ta}全身都湿了。", "水越来越高，到了门口。",
        "风很大，{item}快要飞走了。", "路上没有灯，也没有房子。",
    ),
    solution=(
        "他们坐在[大树|门]下，把{item}放在中间，讲故事等雨停。",
        "{pal}带{ta}到了一个干的地方，{item}也没有湿。",
        "他们一步一步，把{item}拿到了高的地方。", "雨停了，太阳出来，{item}在阳光下很美。",
        "他们用{item}想了个好办法，水终于走了。",
    ),
    truth=("雨后会有太阳", "雨天也可以很快乐", "再大的雨也会停", "一起等，雨就不长"),
)  # fmt: skip
CONTEST_ZH = Plot(
    wish=(
        "那天有一场[唱歌|跳舞|跑步|画画]比赛，奖品是{a_item}。", "{ta}很想在比赛中得到{a_item}。",
        "每年{at}都有比赛，今年的奖品是{a_item}。",
        "“谁[唱|跳|跑|画]得最好，就能得到{a_item}！”大家说。",
    ),
    trouble=(
        "可是别人都比{ta}[快|高|强]，还笑{ta}。", "第一天，{ta}就走错了路。", "{ta}天天练习，还是不太好。",
        "比赛前，{ta}的心跳得很快。",
        "{ta}跑在最后面。",
    ),
    solution=(
        "他们天天一起练习，{name}终于赢得了{item}。", "“别看别人。”{pal}说，{name}一步一步来，最后得到了{item}。",
        "{name}停下来帮助一个难过的孩子，大家就把{item}送给了{ta}。",
        "{name}得了第二，第一名笑着把{item}分享给{ta}和{pal}。",
        "{pal}大声唱歌，{name}忘了害怕，赢得了{item}。",
    ),
    truth=("赢不是最重要的", "天天练习就会变强", "热心的心能得到最好的奖品", "最后的也可以是最好的"),
)  # fmt: skip
SECRET_ZH = Plot(
    wish=(
        "一天，{ta}在[spot]发现了{a_item}。", "{ta}的房间里有{a_item}，没有人知道它从哪儿来。",
        "[family]给了{ta}{a_item}，说：“里面有一个秘密。”",
        "每到夜里，{a_item}就会小声唱歌，只有{ta}听得见。", "{ta}发现，月亮圆的时候，{c_item}会发光。",
    ),
    trouble=(
        "{ta}看了又看，还是不明白。", "{ta}想告诉别人，又怕别人不明白。", "有一天，{item}不动了。",
        "秘密太大，{ta}睡不着觉。",
        "{ta}答应过不告诉别人，这真难。",
    ),
    solution=(
        "{pal}在{item}里发现一张小纸，上面写着：“[你不是一个人|天天快乐|爱就是光]。”",
        "他们等到月亮圆的那天，{item}[唱起了歌|像星星一样发光]。",
        "{name}终于说出了{item}的秘密，心里轻多了。", "他们一起发现，{item}原来是[family]小时候的东西。",
        "{pal}会唱{item}的老歌，他们一唱，[花都开了|星星都出来了]。",
    ),
    truth=("秘密两个人分享就轻了", "小东西也有大秘密", "要相信朋友", "最好的秘密是爱"),
)  # fmt: skip
GIFT_ZH = Plot(
    wish=(
        "[family]的生日到了，{ta}想送{a_item}。", "{ta}在店里看见{a_item}，想买给[family]。",
        "{ta}想自己做{a_item}，送给[family]。",
        "生日那天，{ta}得到了{a_item}，可是不知道是谁送的。", "{ta}有{a_item}，想送给需要它的人。",
    ),
    trouble=(
        "可是{ta}只有[两|三|四]块钱。", "可是{item}在路上坏了。", "店已经关了，天也快黑了。",
        "{ta}忙了一夜，还是不好看。", "{ta}不知道该怎么办。",
    ),
    solution=(
        "{pal}拿来[红纸|白纸|画笔]，和{name}一起把{item}变成了最美的礼物。", "他们一起动手，{item}就像新的一样。",
        "{name}帮{pal}做了一天事，{pal}就用{item}来谢{ta}。", "他们带着{item}走了很多家，终于看见一个孩子笑了。",
        "用一点纸和很多爱，{item}成了最好的礼物。",
    ),
    truth=("礼物要用心", "送礼物和得到礼物一样快乐", "爱不用很多钱", "自己做的礼物最好"),
)  # fmt: skip
FEAR_ZH = Plot(
    wish=(
        "可是{ta}怕[黑|水|高|大声音]，{c_item}却在那一边。", "[family]请{ta}夜里去拿{a_item}。",
        "{ta}需要{a_item}，可是它在[黑黑|冷冷]的房间里。",
        "灯一关，{ta}就要拿着{a_item}睡觉。", "听说老房子里有{a_item}，可是{ta}不敢去。",
    ),
    trouble=(
        "{ta}的心跳得很快，脚也不动了。", "黑黑的地方有声音，{ta}不敢动。", "{ta}去了三次，三次都跑回来了。",
        "{ta}没有告诉别人。",
        "别人都不怕，{ta}更难过了。",
    ),
    solution=(
        "他们一步一步走进去，原来那只是[风|老钟|小鸟]的声音，{name}笑着拿起了{item}。",
        "{pal}也怕，他们就手拉手，数到十，拿到了{item}。",
        "“怕，也可以走过去。”{pal}说，{name}就去了，带着{item}回来了。",
        "他们大声唱歌，越唱越不怕，最后拿到了{item}。",
        "{name}走了一步，又走了一步，{item}就在眼前。",
    ),
    truth=("看清楚了就不怕了", "勇敢的人也会怕", "黑的地方只是没有灯", "一小步也是勇敢"),
)  # fmt: skip
PLOTS_ZH = (LOST_ZH, FRIEND_ZH, JOURNEY_ZH, RAIN_ZH, CONTEST_ZH, SECRET_ZH, GIFT_ZH, FEAR_ZH)

FREE_REQUESTS_ZH: Templates = (
    "讲一个故事。", "给我讲个故事吧。", "请讲一个小故事。", "我想听故事。", "你会讲故事吗？", "写一个短故事。",
    "来一个故事吧。",
    "可以给我讲个故事吗？", "睡觉前给我讲个故事。", "请写一个给孩子的故事。",
)  # fmt: skip
REQUESTS_ZH: Templates = (
    "讲一个{what}的故事。", "请给我讲一个{what}的故事。", "写一个{what}的故事。", "我想听一个{what}的故事。",
    "可以讲一个{what}的故事吗？", "请写一个{what}的小故事。", "来一个{what}的故事吧。",
)  # fmt: skip


# --- Telling a story ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tongue:
    """Wordings of stories in one language."""

    chinese: bool
    names: Sequence[str]
    lists: Words
    opening: Templates
    trait: Templates
    meeting: Templates
    offer: Templates
    ending: Templates
    moral: Templates
    plots: tuple[Plot, ...]
    free: Templates
    requests: Templates
    length: range

    def word(self, rng: Random, pairs: Sequence[tuple[str, str]]) -> str:
        return one_of(rng, pairs)[self.chinese]


ENGLISH = Tongue(
    False, NAMES_EN, LISTS_EN, OPENINGS_EN, TRAITS_EN, MEETINGS_EN, OFFERS_EN, ENDINGS_EN, MORALS_EN, PLOTS_EN,
    FREE_REQUESTS_EN, REQUESTS_EN, range(60, 141),
)  # fmt: skip
CHINESE = Tongue(
    True, NAMES_ZH, LISTS_ZH, OPENINGS_ZH, TRAITS_ZH, MEETINGS_ZH, OFFERS_ZH, ENDINGS_ZH, MORALS_ZH, PLOTS_ZH,
    FREE_REQUESTS_ZH, REQUESTS_ZH, range(60, 151),
)  # fmt: skip

PATTERNS = tuple(
    tuple(parts.split())
    for parts in (
        "name", "kind", "item", "place", "name kind", "name pal", "name item", "name colour item", "name place",
        "kind pal", "kind item", "kind colour item", "kind place", "item place", "colour item", "name pal item",
        "kind pal item", "kind pal place", "kind item place", "name item place", "name kind colour item",
        "name pal colour item", "kind colour item place",
    )
)  # fmt: skip
"""Combinations of subjects in a request: ``name`` and ``kind`` of the hero (with a kind, an animal), ``pal`` (another
animal), ``item``, its ``colour``, ``place``."""


def fill(rng: Random, template: str, lists: Words, fields: Words) -> str:
    """Make all choices of a template, then insert the cast. A list does not yield the same word twice."""
    used: set[str] = set()

    def choose(match: re.Match[str]) -> str:
        options = lists.get(match[1], match[1]).split("|")
        choice = one_of(rng, [option for option in options if option not in used])
        used.add(choice)
        return choice

    return re.sub(r"\[([^\]]+)\]", choose, template).format_map(fields)


def an(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def at_place(place: str, chinese: bool) -> str:
    """``in the garden``, ``by the river``; 花园里, 河边."""
    if not chinese:
        return f"{ON_OR_AT.get(place, 'in')} the {place}"
    return place if place[-1] in "边上" else place + ("上" if place == "海滩" else "里")


def place_name(place: str) -> str:
    """Name of a place without a preposition: 山上 becomes 山, 河边 becomes 河; English is unchanged."""
    return place.removesuffix("上").removesuffix("边")


def counted(noun: str, words: str, default: str) -> str:
    """``一`` with the measure word of ``noun``, before ``words``."""
    return f"一{MEASURES.get(noun, default)}{words}"


def coloured(colour: str, item: str, chinese: bool) -> str:
    if not colour:
        return item
    return f"{colour}的{item}" if chinese else f"{colour} {item}"


def wanted(rng: Random, tongue: Tongue) -> dict[str, str]:
    """Draw the subjects of a request."""
    pattern = one_of(rng, PATTERNS)
    kind, pal = rng.sample(BEASTS, 2)
    values = {
        "name": one_of(rng, tongue.names),
        "kind": kind[tongue.chinese],
        "pal": pal[tongue.chinese],
        "colour": tongue.word(rng, COLOURS),
        "item": tongue.word(rng, THINGS),
        "place": tongue.word(rng, PLACES),
    }
    return {part: values[part] for part in pattern}


def what_en(want: Words) -> str:
    parts = [an(want["kind"])] if "kind" in want else []
    if "name" in want:
        parts = [f"{parts[0]} called {want['name']}" if parts else want["name"]]
    if "pal" in want:
        parts.append(an(want["pal"]))
    if "item" in want:
        parts.append(an(coloured(want.get("colour", ""), want["item"], False)))
    if not parts:
        return "a day " + at_place(want["place"], False)
    text = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return f"{text} {at_place(want['place'], False)}" if "place" in want else text


def what_zh(want: Words) -> str:
    name, kind = want.get("name", ""), want.get("kind", "")
    parts = [f"{counted(kind, '', '只')}叫{name}的{kind}" if name and kind else name or kind, want.get("pal", "")]
    if "item" in want:
        parts.append(coloured(want.get("colour", ""), want["item"], True))
    named = [part for part in parts if part]
    about = "关于" + "和".join(["、".join(named[:-1]), named[-1]] if len(named) > 1 else named) if named else ""
    where = f"发生在{at_place(want['place'], True)}" if "place" in want else ""
    return "、".join(filter(None, (where, about)))


def hero_kind(rng: Random, tongue: Tongue, want: Words, girl: bool, pal: str) -> tuple[str, bool]:
    """Kind of the hero, and whether it is an animal. A hero with only a name is a person."""
    if "kind" in want:
        return want["kind"], True
    if "name" not in want and rng.random() < 0.5:
        return one_of(rng, [pair[tongue.chinese] for pair in BEASTS if pair[tongue.chinese] != pal]), True
    if rng.random() < 0.2:
        return tongue.word(rng, JOBS), False
    return (("boy", "男孩"), ("girl", "女孩"))[girl][tongue.chinese], False


def cast(rng: Random, tongue: Tongue, want: Words) -> dict[str, str]:
    """Cast of a story: the subjects of the request, and random ones for the rest."""
    zh = tongue.chinese
    name = want.get("name") or one_of(rng, tongue.names)
    girl = name in GIRLS
    others = [pair[zh] for pair in BEASTS if pair[zh] != want.get("kind")]
    pal = want.get("pal") or one_of(rng, others)
    kind, beast = hero_kind(rng, tongue, want, girl, pal)
    item = want.get("item") or tongue.word(rng, THINGS)
    colour = want.get("colour") or (tongue.word(rng, COLOURS) if "item" not in want and rng.random() < 0.5 else "")
    place = want.get("place") or tongue.word(rng, PLACES)
    c_item = coloured(colour, item, zh)
    fields = {"name": name, "kind": kind, "pal": pal, "item": item, "c_item": c_item, "place": place_name(place)}
    fields["at"] = at_place(place, zh)
    if zh:
        ta = "它" if beast else "她" if girl else "他"
        one = counted(kind, "", "只" if beast else "个")
        fields |= {"ta": ta, "one": one, "ta_item": ta + (c_item if colour else f"的{item}")}
        return fields | {"a_pal": counted(pal, pal, "只"), "a_item": counted(item, c_item, "个")}
    he, him, his, his_own = ("she", "her", "her", "hers") if girl else ("he", "him", "his", "his")
    fields |= {"he": he, "him": him, "his": his, "his_own": his_own, "He": capital(he), "His": capital(his)}
    return fields | {"a_pal": an(pal), "A_pal": capital(an(pal)), "a_item": an(c_item)}


def sentences(rng: Random, tongue: Tongue, fields: Words) -> list[str]:
    plot = one_of(rng, tongue.plots)
    fields = {**fields, "truth": one_of(rng, plot.truth).format_map(fields)}
    slots = (
        tongue.opening, tongue.trait, plot.wish, plot.trouble, tongue.meeting, tongue.offer, plot.solution,
        tongue.ending, tongue.moral,
    )  # fmt: skip
    return [text for slot in slots if (text := fill(rng, one_of(rng, slot), tongue.lists, fields))]


def tell(rng: Random, tongue: Tongue, want: Words) -> str:
    """Generate a story of a suitable length."""
    while True:
        parts = sentences(rng, tongue, cast(rng, tongue, want))
        text = ("" if tongue.chinese else " ").join(parts)
        length = len(text) if tongue.chinese else len(text.split())
        if length in tongue.length and len(re.findall(r"[.!?。！？]", text)) <= MOST_SENTENCES:
            return text


def story(rng: Random, split: Split) -> Exchange:
    """A story about the user's subjects, or about anything."""
    tongue = CHINESE if is_chinese(rng, CHINESE_SHARE) else ENGLISH
    if rng.random() < FREE_SHARE:
        text = split.draw(lambda: tell(rng, tongue, {}))
        return Exchange(one_of(rng, tongue.free), text, text, Check.FREE)
    want = split.draw(lambda: wanted(rng, tongue), lambda want: sorted(want.items()))
    what = what_zh(want) if tongue.chinese else what_en(want)
    request = one_of(rng, tongue.requests).format(what=what)
    return Exchange(request, tell(rng, tongue, want), request, Check.FREE)


# --- Descriptions ---------------------------------------------------------------------------------------------------

# Category, appearance and behavior, in both languages.
ANIMAL_LOOKS = {
    "cat": ("soft fur and bright eyes", "sleeps in the sun", "软软的毛和明亮的眼睛", "爱在太阳下睡觉"),
    "dog": ("a good nose and a happy tail", "likes to run with people", "很灵的鼻子和快乐的尾巴", "爱和人一起跑"),
    "horse": ("long legs and a long face", "runs fast over the grass", "长长的腿和长长的脸", "在草地上跑得很快"),
    "cow": ("a big body and two horns", "eats grass and gives milk", "大大的身体和两个角", "吃草，给人牛奶"),
    "sheep": ("thick white fur", "eats grass on the hill", "厚厚的白毛", "在山上吃草"),
    "pig": ("a round body and a short tail", "likes to sleep in the sun", "圆圆的身体和短短的尾巴", "爱在地上睡觉"),
    "rabbit": ("long ears and a short tail", "jumps through the grass", "长长的耳朵和短短的尾巴", "在草丛里跳来跳去"),
    "fox": ("red fur and a thick tail", "hunts at night", "红色的毛和大大的尾巴", "晚上出来找吃的"),
    "bear": ("thick fur and strong arms", "sleeps all winter", "厚厚的毛和有力的手", "冬天一直睡觉"),
    "wolf": (
        "grey fur and sharp teeth",
        "lives with its family in the forest",
        "灰色的毛和尖尖的牙",
        "和家人住在森林里",
    ),
    "lion": ("yellow fur and a loud voice", "sleeps in the tall grass", "金色的毛和很大的声音", "白天在树下睡觉"),
    "tiger": ("orange fur with black lines", "hunts alone in the forest", "橙色的毛和黑色的线", "一个人在森林里走"),
    "elephant": ("big ears and a long nose", "drinks a lot of water", "大大的耳朵和长长的鼻子", "每天喝很多水"),
    "monkey": ("long arms and clever hands", "jumps from tree to tree", "长长的手和聪明的眼睛", "在树上跳来跳去"),
    "mouse": ("small ears and a thin tail", "lives behind the wall", "小小的耳朵和长长的尾巴", "爱在夜里找吃的"),
    "frog": ("a green back and big eyes", "jumps into the water", "绿色的身体和大大的眼睛", "跳得远，爱唱歌"),
    "duck": ("a wide mouth and soft feathers", "swims on the water", "软软的羽毛和大大的嘴", "在水上游来游去"),
    "hen": ("brown feathers and a red head", "gives us eggs", "棕色的羽毛和红红的头", "会下蛋"),
    "owl": ("big round eyes and soft feathers", "flies at night", "圆圆的大眼睛和软软的羽毛", "夜里飞出来"),
    "eagle": ("sharp eyes and a brown back", "flies high above the hills", "大大的身体和明亮的眼睛", "飞得很高"),
    "whale": ("a very big body and a wide tail", "sings in the deep sea", "很大很大的身体和大尾巴", "在大海里唱歌"),
    "shark": ("sharp teeth and a grey back", "swims fast in the sea", "尖尖的牙和灰色的身体", "在海里游得很快"),
    "turtle": ("short legs and a green back", "walks a little every day", "硬硬的壳和短短的腿", "走得很慢"),
    "snake": ("a long thin body and no legs", "moves through the grass", "长长的身体，没有腿", "在草丛里静静地走"),
}
PLACE_LOOKS = {
    "garden": ("flowers, trees and green grass", "sit in the sun", "花、树和绿草", "晒太阳"),
    "kitchen": ("a table, cups and plates", "cook hot soup", "桌子、杯子和盘子", "做饭"),
    "library": ("books from the floor to the roof", "read in quiet", "很多很多的书", "安静地看书"),
    "market": ("apples, bread and cheese", "buy good things to eat", "苹果、面包和奶酪", "买好吃的"),
    "school": ("chairs, books and many children", "learn and play", "椅子、书和很多孩子", "学习和玩"),
    "station": ("trains, clocks and many people", "wait for a train", "火车、大钟和很多人", "等火车"),
    "harbour": ("boats, ropes and birds", "watch the boats come and go", "船、绳子和小鸟", "看船来船去"),
    "forest": ("tall trees and old leaves", "listen to the birds", "高高的树和老老的树叶", "听小鸟唱歌"),
    "village": ("small houses and a little road", "meet good neighbours", "小小的房子和一条小路", "认识热心的人"),
    "river": ("clear water, stones and grass", "swim in summer", "清清的水、石头和青草", "游水"),
    "museum": ("old coins, maps and pictures", "learn about old times", "老硬币、地图和画", "看以前的东西"),
    "park": ("trees, flowers and a path", "walk and play", "大树、花和小路", "散步和玩"),
    "office": ("tables, phones and paper", "work and write", "桌子、手机和纸", "工作和写字"),
    "hotel": ("many rooms and soft beds", "sleep on a long journey", "很多房间和软软的床", "好好睡觉"),
    "beach": ("white sand, shells and the blue sea", "play in the sand", "白白的沙子、贝壳和大海", "在水边玩"),
    "mountain": ("stones, snow and clouds", "look far over the land", "石头、雪和白云", "看得很远"),
    "farm": ("cows, hens and a barn", "drink fresh milk", "牛、母鸡和绿草", "喝新的牛奶"),
    "bridge": ("old stones and the water below", "walk over the river", "老石头和下面的水", "走过大河"),
}
THING_USES = {
    "book": ("read it in the evening", "晚上可以看"), "pen": ("write letters with it", "可以用来写字"),
    "lamp": ("read by its light at night", "晚上会发光"), "clock": ("see the time on it", "可以看时间"),
    "key": ("open a door with it", "可以开门"), "cup": ("drink tea from it", "可以用来喝茶"),
    "spoon": ("eat soup with it", "可以用来喝热汤"), "mirror": ("see your face in it", "可以看见自己的脸"),
    "candle": ("light it in the evening", "晚上会发光"), "basket": ("carry apples in it", "可以放苹果"),
    "bottle": ("keep water in it", "可以放水"), "box": ("keep small things in it", "可以放小东西"),
    "coat": ("wear it on cold days", "冷天很温暖"), "hat": ("wear it on your head", "可以放在头上"),
    "glove": ("keep your hand warm with it", "让手很温暖"), "scarf": ("wear it in winter", "冬天用很温暖"),
    "ball": ("play with it in the park", "可以和朋友一起玩"), "kite": ("fly it in the wind", "有风的时候可以飞"),
    "drum": ("make loud music with it", "声音很大"), "guitar": ("play a song on it", "可以一边玩一边唱歌"),
    "camera": ("take pictures with it", "可以用来看东西"), "radio": ("hear music from it", "可以听歌"),
    "map": ("find your way with it", "可以用来找路"), "coin": ("buy a sweet with it", "可以买小东西"),
    "ring": ("wear it on your hand", "可以放在手上"), "rope": ("use it on a boat", "可以拉东西"),
    "flower": ("put it in water", "闻起来很香"), "stone": ("find one by the river", "在河边可以找到"),
    "shell": ("hear the sea in it", "里面有大海的声音"), "feather": ("find one under a tree", "风一吹就飞"),
    "umbrella": ("be dry under it", "下雨天可以用"),
}  # fmt: skip
COUNTRIES = {
    "London": ("England", "英国"), "Paris": ("France", "法国"), "Rome": ("Italy", "意大利"),
    "Berlin": ("Germany", "德国"), "Madrid": ("Spain", "西班牙"), "Vienna": ("Austria", "奥地利"),
    "Oslo": ("Norway", "挪威"), "Cairo": ("Egypt", "埃及"), "Tokyo": ("Japan", "日本"), "Beijing": ("China", "中国"),
    "Shanghai": ("China", "中国"), "Sydney": ("Australia", "澳大利亚"), "Boston": ("the United States", "美国"),
    "Chicago": ("the United States", "美国"), "Lima": ("Peru", "秘鲁"), "Delhi": ("India", "印度"),
    "Moscow": ("Russia", "俄罗斯"), "Athens": ("Greece", "希腊"), "Dublin": ("Ireland", "爱尔兰"),
    "Lisbon": ("Portugal", "葡萄牙"),
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """Subject of a description: templates of the first, second and last sentences, in both languages."""

    english: tuple[Templates, ...]
    chinese: tuple[Templates, ...]


ANIMAL = Subject(
    (
        ("{A_thing} has {look}.", "With {look}, {a_thing} is easy to know.",
         "Look for {look}, and you will find {a_thing}.",
         "{A_thing} is an animal with {look}."),
        ("It {does}.", "As everybody knows, it {does}.", "People say that it {does}.",
         "If you are quiet, you can see how it {does}."),
        ("It is [a fine|a beautiful|a clever|a happy] animal.", "[Many|Most] children like it.",
         "I like to tell stories about it.", "There are many songs and stories about it.", ""),
    ),
    (
        ("{thing}有{look}。", "{thing}是一种动物，有{look}。", "一说{thing}，大家就想到{look}。",
         "{look}，这就是{thing}。"),
        ("它{does}。", "大家都知道，它{does}。", "很多时候，它{does}。"),
        ("它是一种[可爱|聪明|有意思|美丽]的动物。", "很多孩子都喜欢它。", "有很多关于它的故事。", ""),
    ),
)  # fmt: skip
PLACE = Subject(
    (
        ("The {thing} is a [quiet|busy|beautiful|friendly|bright] place.",
         "It is a [warm|cold|bright|clear] day {at}.",
         "The {thing} is [old|small|big] and [full of life|full of light|beautiful]."),
        ("There are {look}.", "You can see {look}.", "Everywhere you look, there are {look}."),
        ("People come here to {does}.", "It is a good place to {does}.", "Here you can {does}."),
        ("In the evening it is [quiet|cool|dark|still].", "I think you would like it.",
         "The air smells [fresh|sweet|good].", ""),
    ),
    (
        ("{thing}是一个[安静|热闹|美丽|温暖]的地方。", "今天天气很好，{thing}很[热闹|安静|美]。",
         "{thing}又[大|小|老]又美。"),
        ("这里有{look}。", "你可以看见{look}。", "到处都是{look}。"),
        ("大家来这里{does}。", "在这里可以{does}。", "很多人在这里{does}。"),
        ("晚上，这里很[安静|黑|美]。", "你一定会喜欢。", "风里有[花|草|雨]的香。", ""),
    ),
)  # fmt: skip
THING = Subject(
    (
        ("This is {a_thing}.", "{A_thing} is a [useful|fine|beautiful] thing.",
         "Look at {a_thing}: it is [small|fine|new|old] and [bright|clean|beautiful]."),
        ("You can {look}.", "It is good to have, because you can {look}.", "With a little time, you can {look}."),
        ("It is [light|cool|warm] in your hand.",
         "It is [not new, but still good|as good as new|easy to carry].",
         "[My|A good] friend would like it as a gift.", "There is one in many houses.", ""),
    ),
    (
        ("这是{a_thing}。", "{a_thing}，[又小又好看|新新的|很好看|很美]。", "看，{a_thing}！"),
        ("它{look}。", "大家喜欢它，它{look}。", "它很有用，{look}。"),
        ("拿在手里[很轻|很温暖|很舒服]。", "它[不新了，可是还很好|像新的一样|很好看]。", "送给朋友，朋友一定会喜欢。",
         "很多人家里都有。", ""),
    ),
)  # fmt: skip
CITY = Subject(
    (
        ("{thing} is a [big|beautiful|busy] city in {look}.", "{thing} lies in {look}.",
         "In {look} there is a city called {thing}."),
        ("It has [old streets|long streets|busy markets|many parks] and [tall houses|good museums|beautiful bridges].",
         "There you find [markets|museums|old houses] and [parks|bridges|fine streets]."),
        ("Many people live and work there.", "People from all over the world come to see it.",
         "At night the lights of the city are bright."),
        ("In the morning the streets are full of [people|life].", "It is good to walk there in the evening.", "",
         ""),
    ),
    (
        ("{thing}是{look}的一个[大|美丽的|有名的|热闹的]城市。", "{thing}在{look}。", "{look}有一个城市叫{thing}。"),
        ("那里有[老街|长街|热闹的市场|很多公园]和[高高的房子|好看的桥|博物馆]。",
         "街上有[老房子|市场|很多店]，也有[公园|博物馆]。"),
        ("很多人在那里生活和工作。", "世界各地的人都去看它。", "夜里，城里的灯很亮。"),
        ("早上，街上[人很多|很热闹]。", "晚上去散步很舒服。", "", ""),
    ),
)  # fmt: skip

DESCRIBE_EN: Templates = (
    "Describe {what}.", "Please describe {what}.", "Can you describe {what}?", "Tell me about {what}.",
    "Write a few sentences about {what}.", "Write a short text about {what}.",
    "Describe {what} in a few sentences.",
)  # fmt: skip
DESCRIBE_ZH: Templates = (
    "描写一下{what}。",
    "请描写{what}。",
    "可以描写一下{what}吗？",
    "请你写几句话，描写{what}。",
    "用几句话描写{what}。",
    "给我说说{what}。",
)


def halves(row: tuple[str, str, str, str], chinese: bool) -> dict[str, str]:
    look, does = row[2:] if chinese else row[:2]
    return {"look": look, "does": does}


def fields_of(rng: Random, chinese: bool) -> tuple[Subject, dict[str, str]]:
    """Draw a subject: its templates and their fields. ``what`` is its name in the request."""
    subject = one_of(rng, (ANIMAL, PLACE, THING, CITY))
    pair = one_of(rng, {ANIMAL: ANIMALS, PLACE: PLACES, THING: THINGS, CITY: CITIES}[subject])
    thing = pair[chinese]
    if subject is ANIMAL:
        fields = halves(ANIMAL_LOOKS[pair[0]], chinese)
    elif subject is PLACE:
        fields = halves(PLACE_LOOKS[pair[0]], chinese)
        fields["at"] = at_place(thing, chinese)
        thing = thing.removesuffix("上")
    elif subject is THING:
        fields = {"look": THING_USES[pair[0]][chinese]}
        thing = coloured(one_of(rng, [("", ""), *COLOURS])[chinese], thing, chinese)
    else:
        fields = {"look": COUNTRIES[pair[0]][chinese]}
    one = counted(pair[1], thing, "个") if chinese else an(thing)
    bare = subject is CITY or (chinese and subject is not THING)
    return subject, fields | {"thing": thing, "a_thing": one, "A_thing": capital(one), "what": thing if bare else one}


def description(rng: Random, split: Split) -> Exchange:
    """Two to four sentences about an animal, a place, a thing or a city."""
    chinese = is_chinese(rng, CHINESE_SHARE)
    requests = DESCRIBE_ZH if chinese else DESCRIBE_EN

    def ask() -> tuple[str, Subject, dict[str, str]]:
        subject, fields = fields_of(rng, chinese)
        return one_of(rng, requests).format(what=fields["what"]), subject, fields

    request, subject, fields = split.draw(ask, lambda drawn: drawn[:1])
    slots = subject.chinese if chinese else subject.english
    parts = [fill(rng, one_of(rng, slot), {}, fields) for slot in slots]
    return Exchange(request, ("" if chinese else " ").join(filter(None, parts)), request, Check.FREE)


SKILLS = {"story": story, "description": description}
